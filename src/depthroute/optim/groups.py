"""Which optimiser gets which parameter, decided by who owns it and not by its shape."""

from typing import Literal, NamedTuple

from torch import nn

from depthroute.residual import ResidualScheme


class Group(NamedTuple):
    """Parameters that are treated alike."""

    name: str
    optimizer: Literal["muon", "adamw"]
    decays: bool
    parameters: dict[str, nn.Parameter]


def parameter_groups(model: nn.Module) -> list[Group]:
    """Put every parameter of a model into one group.

    Muon takes the matrices of the sublayers; rows that an output projection emits for the residual
    scheme are matrices of their own, so that neither part scales the other's update. AdamW takes
    embedding and head, everything a residual scheme owns (a stacked query is no matrix, whatever
    its shape) and vectors, the last two without decay.

    Args:
        model: A `CausalLM`, or any module with `ResidualScheme`, embedding and `lm_head` inside.

    Returns:
        The groups that are not empty, parameters by their full name.
    """
    routing = {
        id(p) for m in model.modules() if isinstance(m, ResidualScheme) for p in m.parameters()
    }
    embedding = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    groups = [
        Group("sublayer matrices", "muon", True, {}),
        Group("emitted key rows", "muon", True, {}),
        Group("embedding", "adamw", True, {}),
        Group("head", "adamw", True, {}),
        Group("routing", "adamw", False, {}),
        Group("vectors", "adamw", False, {}),
    ]
    matrices, emitted, embeddings, head, routed, vectors = (group.parameters for group in groups)
    for name, parameter in model.named_parameters():
        if id(parameter) in routing:
            routed[name] = parameter
        elif id(parameter) in embedding:
            embeddings[name] = parameter
        elif name.split(".")[-2:-1] == ["lm_head"]:
            head[name] = parameter
        elif parameter.ndim != 2:
            vectors[name] = parameter
        elif name.endswith("emit_weight"):
            emitted[name] = parameter
        else:
            matrices[name] = parameter
    return [group for group in groups if group.parameters]


def format_groups(groups: list[Group]) -> str:
    """Return the groups as a table: name, optimiser, decay, tensors, parameters."""
    rows = [("group", "optimiser", "decay", "tensors", "parameters")]
    for group in groups:
        count = sum(p.numel() for p in group.parameters.values())
        decay = "yes" if group.decays else "no"
        rows.append((group.name, group.optimizer, decay, str(len(group.parameters)), f"{count:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
