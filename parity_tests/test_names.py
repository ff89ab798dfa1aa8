"""The map of a user's names: what it says, and that every mistake in it is told with a way out."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core_torch.config import ModelConfig
from core_torch.errors import ConfigError
from parity_tests.harness.names import Shapes, expected_shapes
from parity_tests.instrument.names import NameMap, name_modules, name_parameters, read_map
from parity_tests.instrument.sizes import sizes_of

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "names.toml"
SIZES = dict(vocabulary=97, dim=32, layers=2, heads=4, kv_heads=2, hidden=56)
MODEL = ModelConfig(**SIZES)  # type: ignore[arg-type]
TIED = ModelConfig(**SIZES, tied=True)  # type: ignore[arg-type]
Change = Callable[[str], str]


def instead(old: str, new: str) -> Change:
    """The text of a file with one place changed, which must be there."""

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


def changed(folder: Path, *changes: Change) -> NameMap:
    """The map of the example with these changes."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for change in changes:
        text = change(text)
    path = folder / "names.toml"
    path.write_text(text, encoding="utf-8")
    return read_map(str(path))


def own_shapes(told: NameMap) -> Shapes:
    """Those of a module that the unchanged example fits."""
    names = {given: own for own, given in told.parameters.items()}
    found = {}
    for name, shape in expected_shapes(MODEL).items():
        pattern = re.sub(r"^layers\.\d+", "layers.{i}", name)
        number = name.split(".")[1] if pattern != name else ""
        found[names[pattern].replace("{i}", number)] = shape
    return found


def test_every_parameter_of_the_example_has_its_counterpart(tmp_path: Path) -> None:
    told = changed(tmp_path)
    names = name_parameters(told, own_shapes(told), {}, MODEL)
    assert sorted(names.values()) == sorted(expected_shapes(MODEL))
    assert names["blocks.1.gate.weight"] == "layers.1.feed_forward.w1.weight"


def test_a_row_without_a_number_goes_before_the_pattern(tmp_path: Path) -> None:
    own = instead('"blocks.{i}" = "layers.{i}"', '"blocks.{i}" = "layers.{i}"\n"blocks.1" = "head"')
    found = name_modules(changed(tmp_path, own), ["embedding", "blocks.0", "blocks.1"], MODEL)
    assert found == {"embedding": "embedding", "blocks.0": "layers.0", "blocks.1": "head"}


def test_names_need_no_quotes_where_no_number_stands(tmp_path: Path) -> None:
    told = changed(tmp_path, instead('"head.weight" =', "head.weight ="))
    assert told.parameters["head.weight"] == "output.weight"


FORM = {
    "section": (
        instead("[layout]", "[layouts]"),
        r"\[layouts\]: unknown section; did you mean 'la",
    ),
    "rotary": (instead('"halves"', '"half"'), r"\[layout\] rotary: must be pairs .* got 'half'"),
    "key": (instead("rotary =", "scale = 1\nrotary ="), r"\[layout\] scale: unknown; rotary is"),
    "number": (instead('"layers.{i}.ffn_norm', '"layers.0.ffn_norm'), r"\{i\} must stand once on"),
    "not a name": (instead('"output.weight"', "3"), r"\"head.weight\": expected a name, got 3"),
    "quotes": (instead('"blocks.{i}" =', "blocks.{i} ="), r"not valid TOML"),
}


@pytest.mark.parametrize("case", FORM)
def test_a_file_of_another_form_is_refused(case: str, tmp_path: Path) -> None:
    change, message = FORM[case]
    with pytest.raises(ConfigError, match=message):
        changed(tmp_path, change)


def test_a_map_that_is_nowhere_is_refused_with_those_of_the_package() -> None:
    with pytest.raises(ConfigError, match="maps of the package are huggingface-llama"):
        read_map("huggingface-lama")
    with pytest.raises(ConfigError, match="cannot read 'none.toml': No such file"):
        read_map("none.toml")


Alter = Callable[[Shapes], object]
FITTING: dict[str, tuple[list[Change], Alter, ModelConfig, str]] = {
    "unmapped": (
        [instead('"last_norm.gain" = "norm.weight"', "")],
        lambda own: None,
        MODEL,
        r"last_norm.gain \[32\] is not mapped; of its shape are norm.weight",
    ),
    "no counterpart": (
        [],
        lambda own: own.update({"blocks.0.q.bias": (32,)}),
        MODEL,
        r"blocks.0.q.bias \[32\] has no counterpart: the model has no biases",
    ),
    "two to one": (
        [instead("layers.{i}.attention.wv", "layers.{i}.attention.wk")],
        lambda own: None,
        MODEL,
        r"blocks.0.v.weight and blocks.0.k.weight are both called layers.0.attention.wk.weight",
    ),
    "a stranger": (
        [instead("feed_forward.w2", "feed_forward.w4")],
        lambda own: None,
        MODEL,
        r"'layers.0.feed_forward.w4.weight' is no parameter of the model; did you mean 'layers.0",
    ),
    "a row for nothing": (
        [instead('"blocks.{i}.q.weight"', '"blocks.{i}.qq.weight"')],
        lambda own: None,
        MODEL,
        r"\"blocks.\{i\}.qq.weight\": the module has none; did you mean 'blocks.\{i\}.q.weight'",
    ),
    "wrong shape": (
        [],
        lambda own: own.update({"blocks.1.o.weight": (32, 30)}),
        MODEL,
        r"blocks.1.o.weight is \[32, 30\], and layers.1.attention.wo.weight is \[32, 32\]",
    ),
    "transposed": (
        [],
        lambda own: own.update({"blocks.1.up.weight": (32, 56)}),
        MODEL,
        r"by \[model\]; stored \[in, out\], not \[out, in\]\?",
    ),
    "a block is missing": (
        [],
        lambda own: [own.pop(x) for x in list(own) if x.startswith("blocks.1.")],
        MODEL,
        r"nothing is mapped to layers.1.attention.wq.weight .*; has the module a block 1\?",
    ),
    "a block too many": (
        [],
        lambda own: own.update({"blocks.2.q.weight": (32, 32)}),
        MODEL,
        r"blocks.2.q.weight belongs to block 2, and \[model\] layers is 2",
    ),
    "tied with a head": (
        [],
        lambda own: None,
        TIED,
        r"head.weight is a head of its own, and \[model\] tied says that there is none",
    ),
    "untied without": (
        [],
        lambda own: own.pop("head.weight"),
        MODEL,
        r"nothing is mapped to output.weight .*; if it is the embedding's weight, \[model\] tied",
    ),
}


@pytest.mark.parametrize("case", FITTING)
def test_a_map_that_does_not_fit_the_module_is_refused(case: str, tmp_path: Path) -> None:
    changes, alter, model, message = FITTING[case]
    own = own_shapes(changed(tmp_path))
    alter(own)
    with pytest.raises(ConfigError, match=message):
        name_parameters(changed(tmp_path, *changes), own, {}, model)


def test_the_shared_head_of_a_tied_module_may_have_a_row_and_another_alias_may_not(
    tmp_path: Path,
) -> None:
    told = changed(tmp_path)
    own = own_shapes(told)
    del own["head.weight"]
    tie = {"head.weight": "embedding.weight"}
    assert "output.weight" not in name_parameters(told, own, tie, TIED).values()
    assert "output.weight" not in name_parameters(told, own, {}, TIED).values()
    with pytest.raises(ConfigError, match="another name of embedding.weight.*tied = true"):
        name_parameters(told, own, tie, MODEL)


def test_modules_that_are_not_there_or_compute_no_unit_are_refused(tmp_path: Path) -> None:
    known = ["embedding", "blocks.0", "blocks.1", "blocks.2"]
    with pytest.raises(ConfigError, match="'layers.2' is no unit; units are embedding, layers."):
        name_modules(changed(tmp_path), known, MODEL)
    strange = instead('"embedding" = "embedding"', '"embeding" = "embedding"')
    with pytest.raises(ConfigError, match="no such part; did you mean 'embedding'"):
        name_modules(changed(tmp_path, strange), known[:3], MODEL)
    both = instead('"embedding" = "embedding"', '"embedding" = "layers.0"')
    with pytest.raises(ConfigError, match="both compute the unit layers.0"):
        name_modules(changed(tmp_path, both), known[:3], MODEL)


def test_sizes_are_all_needed_and_checked_as_any_configuration(tmp_path: Path) -> None:
    assert sizes_of(changed(tmp_path), None).hidden == 56
    for change, message in (
        (instead("rope_theta = 10000.0", ""), r"\[model\] rope_theta: is missing"),
        (instead("hidden = 56", "hiden = 56"), r"\[model\] hiden: unknown key; did you mean hid"),
        (instead("hidden = 56", "hidden = 56\ncontext = 9"), r"\[model\] context: has no part"),
        (instead("heads = 4", "heads = 5"), r"\[model\] heads: 5 heads do not divide dim 32"),
        (instead("vocabulary = 97", "vocabulary = 0"), r"vocabulary: must be at least 1, got 0"),
        (instead("dim = 32", 'dim = 32\nkind = "gpt2"'), r"\[model\] kind: a module is compared"),
        (instead("dim = 32", 'config = "meta"'), r"\"huggingface\" is known, got 'meta'"),
    ):
        with pytest.raises(ConfigError, match=message):
            sizes_of(changed(tmp_path, change), None)


def config(**other: Any) -> SimpleNamespace:
    """Fields as transformers 4 and 5 both have them."""
    fields = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    fields |= dict(num_key_value_heads=2, intermediate_size=56)
    told = dict(model_type="llama", hidden_act="silu", rms_norm_eps=1e-6, rope_theta=5e5)
    return SimpleNamespace(**fields, tie_word_embeddings=True, **(told | other))


def test_sizes_are_read_from_the_config_of_a_module(tmp_path: Path) -> None:
    told = read_map("huggingface-llama")
    scaling: dict[str, Any] = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaling |= {"type": "llama3", "original_max_position_embeddings": 512}
    found = sizes_of(told, config(rope_scaling=scaling))
    rope = (found.rope_theta, found.rope_scaling.factor, found.rope_scaling.original_context)
    assert (found.dim, found.kv_heads, found.tied, found.norm_eps) == (32, 2, True, 1e-6)
    assert rope == (5e5, 8.0, 512)
    newer: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5} | {
        k: scaling[k] for k in scaling if k != "type"
    }
    assert sizes_of(told, config(rope_parameters=newer)) == found
    with pytest.raises(ConfigError, match="and the module has no config"):
        sizes_of(told, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "config.attention_bias: the reference has False, got True"),
        ({"mlp_bias": True}, "config.mlp_bias"),
        ({"hidden_act": "gelu"}, "config.hidden_act: the reference has 'silu' or 'swish', got 'ge"),
        ({"model_type": "qwen3"}, "config.model_type"),
        ({"head_dim": 16}, "config.head_dim"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "config.rope_type: .* got 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ({"rms_norm_eps": 0.0}, r"\[model\] norm_eps: must be above 0"),
    ],
)
def test_a_config_that_the_reference_does_not_compute_is_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes_of(read_map("huggingface-llama"), config(**fields))


def test_a_field_that_nobody_here_knows_is_refused_unless_it_is_at_its_default() -> None:
    class Later(SimpleNamespace):
        """The class of a later version, with one more field."""

        clip_scores: float | None = None

    plain = vars(config())
    assert sizes_of(read_map("huggingface-llama"), Later(**plain)).dim == 32
    with pytest.raises(ConfigError, match="config.clip_scores: is unknown here and is 5.0"):
        sizes_of(read_map("huggingface-llama"), Later(**plain, clip_scores=5.0))
