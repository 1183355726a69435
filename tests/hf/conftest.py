"""Tests of the Hugging Face model, which need the extra `hf`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.utils import logging

from depthroute.models import CausalLM
from depthroute.models.hf import DepthRouteConfig, DepthRouteForCausalLM
from helpers import VARIANTS, tiny_model

MakeShell = Callable[..., DepthRouteForCausalLM]


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def shell_of(model: CausalLM, **fields: Any) -> DepthRouteForCausalLM:
    """Return the Hugging Face form of a model, with copies of its weights."""
    config = DepthRouteConfig.from_model_config(model.config, **fields)
    shell = DepthRouteForCausalLM(config).to(model.lm_head.weight.dtype).eval()
    shell.load_state_dict(model.state_dict())
    return shell


@pytest.fixture
def pair() -> Callable[..., tuple[CausalLM, DepthRouteForCausalLM]]:
    """Make a model with clear preferences, and its Hugging Face form."""

    def make(
        name: str = "s_lr",
        *,
        dtype: torch.dtype = torch.float64,
        fields: Any = None,
        **changes: Any,
    ) -> tuple[CausalLM, DepthRouteForCausalLM]:
        model = tiny_model(VARIANTS[name], dtype=dtype, **changes)
        with torch.no_grad():
            model.lm_head.weight.mul_(10)
        return model, shell_of(model, **(fields or {}))

    return make
