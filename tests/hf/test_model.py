"""The forward pass: the decoder's numbers, and what transformers users may ask for."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthroute.models.hf import DepthRouteModel
from helpers import VARIANTS, assert_close

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
ONES = torch.ones_like(IDS)


def enable_checkpointing(shell, settings=None):
    with warnings.catch_warnings():  # transformers 5.24 has a second name for it
        warnings.simplefilter("ignore", FutureWarning)
        shell.gradient_checkpointing_enable(settings)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_decoder(pair, name):
    model, shell = pair(name)
    assert_close(shell(IDS).logits, model(IDS))


# the second scheme runs Softmax1 attention, with one more key
schemes = pytest.mark.parametrize("name", ["s_lr", "oasis_block3"])
attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


@schemes
@attentions
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(pair, name, attention, side):
    model, shell = pair(name)
    shell.set_attn_implementation(attention)
    pad = (3, 0) if side == "left" else (0, 3)
    ids, mask = F.pad(IDS[:, :5], pad, value=60), F.pad(ONES[:, :5], pad)
    ids[1, :], mask[1, :] = F.pad(IDS[1], (1, 0)), F.pad(ONES[1], (1, 0))  # another length
    logits = shell(ids, attention_mask=mask).logits
    assert_close(logits[0][mask[0] == 1], model(IDS[:1, :5])[0])
    assert_close(logits[1][mask[1] == 1], model(IDS[1:])[0])


@schemes
@attentions
def test_positions_that_restart_keep_documents_apart(pair, name, attention):
    model, shell = pair(name)
    shell.set_attn_implementation(attention)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    logits = shell(IDS[:1], position_ids=positions).logits
    assert_close(logits[:, :3], model(IDS[:1, :3]))
    assert_close(logits[:, 3:], model(IDS[:1, 3:]))


@schemes
def test_chunks_with_a_cache_equal_one_pass(pair, name):
    model, shell = pair(name)
    first = shell(IDS[:, :3], use_cache=True)
    cache = first["cache" if "cache" in first else "past_key_values"]
    rest = shell(IDS[:, 3:], attention_mask=ONES, past_key_values=cache)
    assert_close(torch.cat([first.logits, rest.logits], dim=1), model(IDS))
    assert cache.get_seq_length() == 7


def test_embeddings_stand_for_tokens(pair):
    model, shell = pair()
    embeds = shell.get_input_embeddings()(IDS)
    assert_close(shell(inputs_embeds=embeds).logits, model(IDS))


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])], ids=["1", "3", "places"])
def test_only_the_asked_logits_are_made(pair, keep):
    _, shell = pair()
    places = keep if torch.is_tensor(keep) else torch.arange(7 - keep, 7)
    assert_close(shell(IDS, logits_to_keep=keep).logits, shell(IDS).logits[:, places])


def test_loss_is_the_mean_over_shifted_labels(pair):
    model, shell = pair()
    labels = IDS.clone()
    labels[0, :4] = -100
    per_token = F.cross_entropy(model(IDS)[:, :-1].mT, labels[:, 1:], reduction="none")
    out = shell(IDS, labels=labels)
    assert_close(out.loss.double(), per_token.sum() / 9, rtol=1e-6)
    assert_close(out.logits, model(IDS))
    summed = shell(IDS, labels=labels, num_items_in_batch=4)
    assert_close(summed.loss.double(), per_token.sum() / 4, rtol=1e-6)
    nothing = shell(IDS, labels=torch.full_like(IDS, -100), num_items_in_batch=4)
    assert nothing.loss == 0


@pytest.mark.parametrize("name", ["prenorm", "s_lr", "p_lr_full", "laurel_all"])
def test_hidden_states_are_what_layers_and_head_read(pair, name):
    model, shell = pair(name)
    heard = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    model.lm_head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    model(IDS)
    states = shell(IDS, output_hidden_states=True).hidden_states
    assert len(states) == 5
    for state, expected in zip(states, heard, strict=True):
        assert_close(state, expected)


def test_hidden_states_carry_gradients(pair):
    _, shell = pair()
    shell(IDS, output_hidden_states=True).hidden_states[2].square().sum().backward()
    assert shell.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    assert shell.model.layers[2].mlp.up_proj.weight.grad is None


def test_depth_weights_show_each_read(pair):
    _, shell = pair("attn_res_full")
    with torch.no_grad():
        shell.model.residual.query.zero_()
    weights = shell(IDS, output_depth_weights=True).depth_weights
    assert len(weights) == 9
    for site, weight in enumerate(weights):  # the embedding and the outputs of `site` sublayers
        expected = torch.full((1, site + 1, 2, 7, 1), 1 / (site + 1), dtype=torch.float64)
        assert_close(weight, expected)
    assert pair("prenorm")[1](IDS, output_depth_weights=True).depth_weights is None


@schemes
def test_attention_weights_come_from_eager_attention(pair, name):
    _, shell = pair(name)
    with pytest.raises(ValueError, match='attn_implementation="eager"'):
        shell(IDS, output_attentions=True)
    shell.set_attn_implementation("eager")
    weights = shell(IDS, output_attentions=True).attentions
    null = shell.model.residual.token_null  # the first column then
    assert [tuple(weight.shape) for weight in weights] == [(2, 4, 7, 7 + null)] * 4
    for weight in weights:
        assert_close(weight.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))
        assert weight[..., null:].triu(1).abs().max() == 0


@schemes
@attentions
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_a_mask_may_be_ready_for_the_attention_function(pair, name, attention, kind):
    model, shell = pair(name)
    shell.set_attn_implementation(attention)
    sees = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    mask = sees if kind == "boolean" else torch.where(sees, 0.0, -1e30).double()
    assert_close(shell(IDS, attention_mask=mask).logits, model(IDS))


def test_a_registered_attention_function_is_used(pair):
    model, shell = pair()
    shapes = []

    def mine(module, query, key, value, attention_mask, **settings):
        shapes.append(key.shape)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, **settings
        )

    AttentionInterface.register("mine", mine)
    AttentionMaskInterface.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    shell.set_attn_implementation("mine")
    assert_close(shell(IDS).logits, model(IDS))
    assert shapes == [(2, 4, 7, 8)] * 4  # once a layer; heads of keys come repeated


@pytest.mark.parametrize("name", ["prenorm", "attn_res_full", "s_lr", "denseformer"])
def test_gradient_checkpointing_saves_memory_and_no_gradient(pair, name):
    _, shell = pair(name, fields={"use_cache": True})
    shell.train()
    ids = IDS.repeat(1, 6)

    def run() -> tuple[int, dict[str, torch.Tensor]]:
        shell.zero_grad()
        saved: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = shell(ids, labels=ids).loss
        num_bytes = sum(saved.values())
        loss.backward()
        return num_bytes, {
            n: p.grad.clone() for n, p in shell.named_parameters() if p.grad is not None
        }

    plain_bytes, plain = run()
    enable_checkpointing(shell)
    assert shell.gradient_checkpointing
    fewer_bytes, again = run()
    assert fewer_bytes < plain_bytes / 2
    for key in plain:
        assert torch.equal(plain[key], again[key]), key
    assert shell(IDS).keys() == {"logits"}  # no cache


@pytest.mark.parametrize("name", ["s_lr", "p_lr", "laurel_all"])
def test_autocast_leaves_routing_in_float32(pair, name):
    model, shell = pair(name, dtype=torch.float32)
    model.model.compute_dtype = torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        out = shell(IDS, output_hidden_states=True)
    assert out.logits.dtype == torch.bfloat16
    assert torch.equal(out.hidden_states[-1], model.model(IDS))


def test_the_body_gives_the_hidden_states(pair, tmp_path):
    model, shell = pair()
    shell.save_pretrained(tmp_path)
    body, info = DepthRouteModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    out = body(IDS, output_hidden_states=True)
    assert_close(out.last_hidden_state, model.model(IDS), rtol=1e-6)  # routing is float32
    assert out.hidden_states[-1] is out.last_hidden_state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 7, 32)}, "exactly one of input_ids"),
        ({"input_ids": IDS, "labels": IDS, "logits_to_keep": 2}, "leave logits_to_keep at 0"),
        ({"input_ids": IDS, "attention_mask": ONES[:, 1:]}, r"attention_mask must be \[2, 7\]"),
        ({"input_ids": IDS, "position_ids": IDS[0]}, r"position_ids must be \[1 or 2, 7\]"),
        ({"input_ids": IDS, "position_ids": IDS[:, :1]}, r"must be \[1 or 2, 7\], got \(2, 1\)"),
        ({"input_ids": IDS, "attention_mask": ONES[0]}, r"\[B, past \+ T\] or .*, got \(7,\)"),
        ({"input_ids": IDS[0]}, r"input_ids must be integers \[B, T\] .* torch.int64 \(7,\)"),
        ({"input_ids": IDS[:, :0]}, r"with T >= 1, got torch.int64 \(2, 0\)"),
        ({"input_ids": IDS.float()}, r"must be integers .* got torch.float32"),
        ({"inputs_embeds": torch.zeros(2, 7, 8)}, r"inputs_embeds must be \[B, T, 32\]"),
        ({"input_ids": IDS, "cache": ()}, "must be a transformers.Cache, got tuple"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 7, 7, dtype=torch.int64)},
            "must be boolean or what is added to the scores, got torch.int64",
        ),
        ({"input_ids": IDS, "logits_to_keep": -1}, "logits_to_keep must be >= 0, got -1"),
        (
            {"input_ids": IDS, "cache": DynamicCache(), "past_key_values": DynamicCache()},
            "give the cache once",
        ),
    ],
)
def test_contradictory_arguments_are_refused(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        pair()[1](**arguments)


def test_an_unknown_argument_is_refused(pair):
    with pytest.raises(TypeError, match="output_depth_weight"):
        pair()[1](IDS, output_depth_weight=True)


def test_checkpointing_of_another_kind_is_refused(pair):
    shell = pair()[1]
    with pytest.raises(ValueError, match="use_reentrant=False"):
        enable_checkpointing(shell, {"use_reentrant": True})
    enable_checkpointing(shell, {"use_reentrant": False})
    with pytest.raises(ValueError, match="cannot fill a cache"):
        shell(IDS, use_cache=True)


def test_a_tuple_on_request(pair):
    model, shell = pair()
    (logits,) = shell(IDS, use_cache=False, return_dict=False)
    assert_close(logits, model(IDS))
