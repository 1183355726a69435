import json
import tomllib
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthroute.config import (
    ConfigError,
    config_dataclass,
    dump,
    from_dict,
    load,
    tagged_union,
    to_dict,
)


@config_dataclass
class Tail:
    name: Literal["tail"] = "tail"
    rank: int = 128
    norm: Literal["tail", "full"] = "tail"


@config_dataclass
class Projected:
    name: Literal["projected"] = "projected"
    rank: int = 64
    bias: bool = False


Key = tagged_union(Tail, Projected)


@config_dataclass
class AttnRes:
    name: Literal["attn_res"] = "attn_res"
    num_blocks: int = 8
    block_ends: tuple[int, ...] | None = None
    key: Annotated[Key, "how a source is addressed"] = Tail()

    def __post_init__(self) -> None:
        if self.num_blocks < 0:
            raise ValueError(f"num_blocks must be >= 0, got {self.num_blocks}")


@config_dataclass
class PreNorm:
    name: Literal["prenorm"] = "prenorm"
    scale: float = 1.0


Residual = tagged_union(AttnRes, PreNorm)


@dataclass(frozen=True, kw_only=True)  # no decorator of ours: must be checked as strictly
class Model:
    dim: int
    residual: Residual
    extra: Residual | None = None


@config_dataclass
class Train:
    steps: int
    lr: float = 1e-05
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = None
    compile: bool = False
    device: Literal["cpu", "cuda"] | None = None
    every: int | Literal["never"] = "never"
    shard: tuple[str, int] = ("all", 0)

    def __post_init__(self) -> None:
        if self.lr > 1:
            raise ValueError(f"lr must be <= 1, got {self.lr}")


@config_dataclass
class Run:
    name: str = "run"
    tags: tuple[str, ...] = field(default_factory=tuple)
    model: Model
    train: Train


FILE = """
name = "small"
tags = ["a", "b"]

[model]
dim = 64

[model.residual]
name = "attn_res"
num_blocks = 4
key = { name = "tail", rank = 32, norm = "full" }

[train]
steps = 10
lr = 1
"""

RUN = Run(
    name="small",
    tags=("a", "b"),
    model=Model(dim=64, residual=AttnRes(num_blocks=4, key=Tail(rank=32, norm="full"))),
    train=Train(steps=10, lr=1.0),
)


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="run.toml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
        return path

    return write_file


@pytest.fixture
def path(write):
    return write(FILE)


def message(path, *overrides, cls=Run):
    with pytest.raises(ConfigError) as caught:
        load(cls, path, overrides)
    return str(caught.value)


# reading


def test_file_becomes_nested_configs(path):
    assert load(Run, path) == RUN


def test_configs_are_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        RUN.train.steps = 3
    with pytest.raises(TypeError):
        Tail("tail")


def test_without_a_file_overrides_alone_make_a_config():
    overrides = ["model.dim=8", "model.residual.name=prenorm", "train.steps=1"]
    expected = Run(model=Model(dim=8, residual=PreNorm()), train=Train(steps=1))
    assert load(Run, overrides=overrides) == expected


def test_base_argument_is_the_lowest_layer(write):
    path = write("[train]\nlr = 0.5")
    run = load(Run, path, ["train.steps=11"], base=to_dict(RUN))
    assert run.train == Train(steps=11, lr=0.5)
    assert run.model == RUN.model


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", "plain"),
        ("some/dir", "some/dir"),
        ('"quoted"', "quoted"),
        ('"8"', "8"),
        ("", ""),
        ("a=b", "a=b"),
        (" spaced ", "spaced"),
        ("[1, 2", "[1, 2"),
        ("1 # no comment", "1 # no comment"),
        ("1, y = 2", "1, y = 2"),
        ("1}\ny = {x = 2", "1}\ny = {x = 2"),
        ("1, y = 2}\ny = {x = 2", "1, y = 2}\ny = {x = 2"),
    ],
)
def test_override_that_is_not_toml_is_a_plain_string(path, text, value):
    assert load(Run, path, [f"name={text}"]).name == value


def test_override_values_are_toml(path):
    run = load(
        Run,
        path,
        ["train.lr=1e-4", "train.compile=true", 'tags=["x"]', "train.clip = inf", "train.every=5"],
    )
    assert run.train == Train(steps=10, lr=0.0001, compile=True, clip=float("inf"), every=5)
    assert run.tags == ("x",)


def test_last_of_equal_overrides_wins(path):
    assert load(Run, path, ["train.steps=1", "train.steps=2"]).train.steps == 2


def test_integer_is_fine_for_a_float_and_keeps_the_float_type(path):
    assert type(load(Run, path).train.lr) is float


# layers


def test_override_of_a_nested_key_keeps_its_neighbours(path):
    residual = load(Run, path, ["model.residual.key.rank=5"]).model.residual
    assert residual == AttnRes(num_blocks=4, key=Tail(rank=5, norm="full"))


def test_table_override_merges_with_the_table_below(path):
    residual = load(Run, path, ["model.residual={num_blocks = 2}"]).model.residual
    assert residual == AttnRes(num_blocks=2, key=Tail(rank=32, norm="full"))


def test_new_name_drops_the_keys_of_the_old_class(path):
    assert load(Run, path, ["model.residual.name=prenorm"]).model.residual == PreNorm()
    residual = load(Run, path, ["model.residual.key.name=projected"]).model.residual
    assert residual == AttnRes(num_blocks=4, key=Projected())


def test_same_name_keeps_the_other_keys(path):
    residual = load(Run, path, ["model.residual.name=attn_res"]).model.residual
    assert residual == RUN.model.residual


@pytest.mark.parametrize("order", [1, -1])
def test_new_name_keeps_overrides_of_the_new_class_in_any_order(path, order):
    overrides = ["model.residual.name=prenorm", "model.residual.scale=0.5"][::order]
    assert load(Run, path, overrides).model.residual == PreNorm(scale=0.5)


def test_override_for_the_old_class_is_not_lost_silently(path):
    text = message(path, "model.residual.num_blocks=2", "model.residual.name=prenorm")
    assert text == "model.residual.num_blocks: unknown key; known keys: name, scale"


def test_name_that_is_not_a_tag_is_an_ordinary_key(path):
    assert load(Run, path, ["name=other"]) == Run(
        name="other", tags=RUN.tags, model=RUN.model, train=RUN.train
    )


def test_file_is_merged_over_its_base_relative_to_itself(write):
    write(FILE, "common/small.toml")
    path = write(
        """
        base = "../common/small.toml"
        tags = []
        [model.residual]
        name = "prenorm"
        [train]
        clip = 2.0
        """,
        "runs/a.toml",
    )
    assert load(Run, path) == Run(
        name="small",
        model=Model(dim=64, residual=PreNorm()),
        train=Train(steps=10, lr=1.0, clip=2.0),
    )


def test_base_of_a_base_is_refused(write):
    write('base = "c.toml"', "b.toml")
    path = write('base = "b.toml"', "a.toml")
    expected = f'{path}: base: expected a file without a base, but "b.toml" has one'
    assert message(path) == expected


def test_base_that_is_no_string_is_refused(write):
    path = write("base = 3")
    assert message(path) == f"{path}: base: expected string, got int 3"


def test_base_that_does_not_exist_is_named(write):
    path = write('base = "gone.toml"')
    assert (
        message(path) == f"{path.parent / 'gone.toml'}: cannot be read: No such file or directory"
    )


def test_registry_with_one_class_is_allowed():
    only = tagged_union(Tail)
    assert from_dict(only, {"rank": 2}) == Tail(rank=2)


# errors


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "model.residual.key.rnk=3",
            'model.residual.key.rnk: unknown key; did you mean "rank"? '
            "known keys: name, norm, rank",
        ),
        (
            "model.zzz=3",
            "model.zzz: unknown key; known keys: dim, extra, residual",
        ),
        (
            "model.residual.name=atn_res",
            'model.residual.name: unknown "atn_res"; did you mean "attn_res"? '
            "choices: attn_res, prenorm",
        ),
        ("model.residual.name=3", "model.residual.name: unknown 3; choices: attn_res, prenorm"),
        (
            "model.residual.key.norm=ful",
            'model.residual.key.norm: unknown "ful"; did you mean "full"? choices: full, tail',
        ),
        ("train.device=tpx", 'train.device: unknown "tpx"; choices: cpu, cuda'),
        ("train.every=nevr", 'train.every: expected int or "never", got string "nevr"'),
        ("train.steps=many", 'train.steps: expected int, got string "many"'),
        ('train.steps="8"', 'train.steps: expected int, got string "8"'),
        ("train.steps=8.0", "train.steps: expected int, got float 8.0"),
        ("train.steps=true", "train.steps: expected int, got bool true"),
        ("train.lr=true", "train.lr: expected float, got bool true"),
        ("train.compile=1", "train.compile: expected bool, got int 1"),
        ("name=3", "name: expected string, got int 3"),
        ("name=2024-01-01", 'name: expected string, got date "2024-01-01"'),
        ("tags=2024-01-01", 'tags: expected array [string, ...], got date "2024-01-01"'),
        ("train=2024-01-01", 'train: expected table, got date "2024-01-01"'),
        ("model.residual=2024-01-01", 'model.residual: expected table, got date "2024-01-01"'),
        ("tags=[1]", "tags[0]: expected string, got int 1"),
        ("tags=x", 'tags: expected array [string, ...], got string "x"'),
        (
            "train.betas=[1, 2, 3]",
            "train.betas: expected array [float, float], got array [1, 2, 3]",
        ),
        ('train.shard=["a", "b"]', 'train.shard[1]: expected int, got string "b"'),
        ("train.betas=[1]", "train.betas[1]: required key is missing; expected float"),
        (
            "model.residual.block_ends=[1, 2.5]",
            "model.residual.block_ends[1]: expected int, got float 2.5",
        ),
        ("train=5", "train: expected table, got int 5"),
        ("model.residual=5", "model.residual: expected table, got int 5"),
        ("model.residual.key=[]", "model.residual.key: expected table, got array []"),
        (
            "model.extra.scale=2",
            "model.extra.name: required key is missing; choices: attn_res, prenorm",
        ),
        ("model.residual.num_blocks=-3", "model.residual: num_blocks must be >= 0, got -3"),
        ("train.lr=2", "train: lr must be <= 1, got 2.0"),
        (
            "trian.lr=2",
            'trian: unknown key; did you mean "train"? known keys: model, name, tags, train',
        ),
        ("train.steps", 'override "train.steps": expected dotted.key=value, got no "="'),
        ("=3", 'override "=3": expected dotted.key=value, got an empty key'),
        ("train..lr=3", 'override "train..lr=3": expected dotted.key=value, got an empty key'),
    ],
)
def test_error_names_key_expectation_and_value(path, override, expected):
    assert message(path, override) == expected


def test_missing_keys_are_named(write):
    path = write("[model]\ndim = 3\n[model.residual]\n[train]")
    assert message(path).splitlines() == [
        "model.residual.name: required key is missing; choices: attn_res, prenorm",
        "train.steps: required key is missing; expected int",
    ]
    assert message(write("")).splitlines() == [
        "model: required key is missing; expected table",
        "train: required key is missing; expected table",
    ]


def test_all_problems_are_listed(path):
    text = message(path, "train.steps=many", "model.dim=x", "model.residual.key.rnk=1", "nam=x")
    assert {line.split(":")[0] for line in text.splitlines()} == {
        "train.steps",
        "model.dim",
        "model.residual.key.rnk",
        "nam",
    }
    assert len(text.splitlines()) == 4


def test_key_of_a_union_may_be_named_like_a_tag(path):
    text = message(path, "model.residual.attn_res=1")
    assert text.startswith("model.residual.attn_res: unknown key; known keys: block_ends,")


def test_error_in_the_root_object_names_its_keys_alone():
    assert _message_of(Train, {"steps": 1, "lr": 2}) == "lr must be <= 1, got 2.0"
    assert _message_of(Train, {"stesp": 1}).splitlines()[0].startswith("steps: required key")
    assert _message_of(Residual, {"name": "x"}).startswith('name: unknown "x"; choices: ')


def test_null_is_refused_where_none_is_not_a_value():
    assert _message_of(Train, {"steps": None}) == "steps: expected int, got value null"


def test_long_values_are_shortened(path):
    text = message(path, f"train.steps={'x' * 1000}")
    assert text.startswith('train.steps: expected int, got string "xxx')
    assert text.endswith("xxx...")
    assert len(text) < 150


def test_bad_toml_names_file_and_line(write):
    path = write("[train]\nsteps = = 3\n")
    text = message(path)
    assert text.startswith(f"{path}: not a TOML file: ")
    assert "line 2" in text


def test_file_that_is_not_utf8_or_not_a_file_is_named(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b'name = "\xff"')
    assert message(path).startswith(f"{path}: not a TOML file: ")
    assert message(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


def _message_of(cls, values):
    with pytest.raises(ConfigError) as caught:
        from_dict(cls, values)
    return str(caught.value)


# writing


def test_dump_is_the_expected_toml():
    run = Run(
        name='a "b" \\ \n \x7f \u00e9',
        tags=("x", "y"),
        model=Model(dim=3, residual=AttnRes(block_ends=(1, 2))),
        train=Train(steps=2, compile=True, clip=1e16),
    )
    text = dump(run)
    assert text.splitlines()[:2] == [
        'name = "a \\"b\\" \\\\ \\n \\u007f \u00e9"',
        'tags = ["x", "y"]',
    ]
    assert tomllib.loads(text) == {
        "name": 'a "b" \\ \n \x7f \u00e9',
        "tags": ["x", "y"],
        "model": {
            "dim": 3,
            "residual": {
                "name": "attn_res",
                "num_blocks": 8,
                "block_ends": [1, 2],
                "key": {"name": "tail", "rank": 128, "norm": "tail"},
            },
        },
        "train": {
            "steps": 2,
            "lr": 1e-05,
            "betas": [0.9, 0.95],
            "clip": 1e16,
            "compile": True,
            "every": "never",
            "shard": ["all", 0],
        },
    }


def test_dump_of_tables_alone_starts_with_a_table():
    @config_dataclass
    class Outer:
        key: Tail = Tail(rank=2)

    assert dump(Outer()) == '[key]\nname = "tail"\nrank = 2\nnorm = "tail"\n'


def test_dump_refuses_what_would_not_read_back():
    @config_dataclass
    class Optional:
        limit: int | None = 5

    @config_dataclass
    class Holder:
        inner: Optional
        value: object = 1

    with pytest.raises(ConfigError, match=r"^inner\.limit: TOML cannot say None"):
        dump(Holder(inner=Optional(limit=None)))
    with pytest.raises(ConfigError, match=r"^value: expected a value that TOML can say, got set"):
        dump(Holder(inner=Optional(), value={1}))


texts = st.text(max_size=8)
floats = st.floats(allow_nan=False)
tails = st.builds(Tail, rank=st.integers(), norm=st.sampled_from(["tail", "full"]))
keys = tails | st.builds(Projected, rank=st.integers(), bias=st.booleans())
residuals = st.builds(PreNorm, scale=floats) | st.builds(
    AttnRes,
    num_blocks=st.integers(min_value=0),
    block_ends=st.none() | st.lists(st.integers(), max_size=3).map(tuple),
    key=keys,
)
trains = st.builds(
    Train,
    steps=st.integers(),
    lr=st.floats(max_value=1, allow_nan=False),
    betas=st.tuples(floats, floats),
    clip=st.none() | floats,
    compile=st.booleans(),
    device=st.sampled_from([None, "cpu", "cuda"]),
    every=st.integers() | st.just("never"),
    shard=st.tuples(texts, st.integers()),
)
models = st.builds(Model, dim=st.integers(), residual=residuals, extra=st.none() | residuals)
runs = st.builds(
    Run, name=texts, tags=st.lists(texts, max_size=3).map(tuple), model=models, train=trains
)


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    return tmp_path_factory.mktemp("dump") / "run.toml"


@settings(deadline=None, derandomize=True)
@given(run=runs)
def test_dump_reads_back_to_an_equal_config(dumped, run):
    dumped.write_text(dump(run), encoding="utf-8")
    again = load(Run, dumped)
    assert again == run
    assert repr(again) == repr(run)  # tells 0.0 from -0.0 and 1 from True, which == does not


@settings(deadline=None, derandomize=True)
@given(run=runs)
def test_dictionary_survives_json_and_gives_an_equal_config(run):
    stored = to_dict(run)
    assert json.loads(json.dumps(stored)) == stored
    assert from_dict(Run, stored) == run
