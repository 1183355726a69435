"""Residual schemes by name: the subject of the package."""

from collections.abc import Sequence
from typing import Any

from depthroute.config import tagged_union
from depthroute.residual.attn_res import AttnRes, AttnResConfig, Summary
from depthroute.residual.base import Cost, Kind, ResidualScheme
from depthroute.residual.delta import Delta, DeltaConfig
from depthroute.residual.denseformer import DenseFormer, DenseFormerConfig
from depthroute.residual.dual import Dual, DualConfig
from depthroute.residual.hyper import Hyper, HyperConfig
from depthroute.residual.keys import FromValueKey, ProjectedKey, TailKey
from depthroute.residual.laurel import Laurel, LaurelConfig
from depthroute.residual.mrla import Mrla, MrlaConfig
from depthroute.residual.mudd import Mudd, MuddConfig
from depthroute.residual.oasis import Oasis, OasisConfig
from depthroute.residual.prenorm import PreNorm, PreNormConfig

SCHEMES: dict[str, type[ResidualScheme]] = {
    "prenorm": PreNorm,
    "attn_res": AttnRes,
    "delta": Delta,
    "denseformer": DenseFormer,
    "dual": Dual,
    "laurel": Laurel,
    "mrla": Mrla,
    "mudd": Mudd,
    "hyper": Hyper,
    "oasis": Oasis,
}
"""Every scheme by the `name` of its config. To add one, add a line."""

ResidualConfig = tagged_union(*(scheme.Config for scheme in SCHEMES.values()))


def build_residual(
    config: Any, *, dim: int, kinds: Sequence[Kind], eps: float = 1e-6
) -> ResidualScheme:
    """Build the scheme that a config describes.

    Args:
        config: The `Config` of a registered scheme.
        dim: Width of the residual stream, >= 1.
        kinds: What each sublayer is, in order, e.g. `("attention", "mlp") * 24`.
        eps: Epsilon of every key norm, > 0.

    Raises:
        ValueError: The config does not fit the width or the depth; the message says how.
        TypeError: The config belongs to no registered scheme.
    """
    scheme = SCHEMES.get(getattr(config, "name", ""))
    if scheme is None or not isinstance(config, scheme.Config):
        raise TypeError(
            f"config must be a residual config, one of {', '.join(SCHEMES)}, got {config!r}"
        )
    return scheme(config, dim=dim, kinds=kinds, eps=eps)


__all__ = [
    "SCHEMES",
    "AttnRes",
    "AttnResConfig",
    "Cost",
    "Delta",
    "DeltaConfig",
    "DenseFormer",
    "DenseFormerConfig",
    "Dual",
    "DualConfig",
    "FromValueKey",
    "Hyper",
    "HyperConfig",
    "Kind",
    "Laurel",
    "LaurelConfig",
    "Mrla",
    "MrlaConfig",
    "Mudd",
    "MuddConfig",
    "Oasis",
    "OasisConfig",
    "PreNorm",
    "PreNormConfig",
    "ProjectedKey",
    "ResidualConfig",
    "ResidualScheme",
    "Summary",
    "TailKey",
    "build_residual",
]
