"""What `depthroute doctor` says."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from depthroute.ops.backend import describe_backend
from depthroute.train.config import placement
from depthroute.train.run import environment

_OPTIONAL = {
    "tokenizers": "data",
    "tiktoken": "data",
    "pyarrow": "data",
    "matplotlib": "plot",
    "lm_eval": "eval",
    "triton": "gpu",
    "transformers": "hf",
}


def report() -> str:
    """Return versions, devices and optional packages, one per line."""
    lines = [f"{key}: {value}" for key, value in environment().items()]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}: {found.name}, {found.total_memory / 2**30:.0f} GiB")
    device, _ = placement("auto", "auto")
    lines.append(f"backend of depth reads: {describe_backend(device)}")
    for package, extra in _OPTIONAL.items():
        lines.append(f"{package}: {_version(package, extra)}")
    return "\n".join(lines)


def _version(package: str, extra: str) -> str:
    if find_spec(package) is None:
        return f'missing: pip install "depthroute[{extra}]"'
    try:
        return version(package)
    except PackageNotFoundError:
        return "present, version unknown"
