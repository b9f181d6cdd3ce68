"""Prompt cleaning, tokenisation and encoding against diffusers' WanPipeline."""

import json
import pathlib
import runpy

import diffusers
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from diffusers.pipelines.wan import pipeline_wan

from tests import emulator, tiny
from wanjax import setup as setups
from wanjax.data import text

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "tiny_tokenizer.py"
WORDS = "a red blue circle square moving left right and on gray background".split()
PROMPTS = [
    "",
    "a red circle moving left",
    "a  red\tcircle \n moving left ",
    "a reddish circle, moving upwards!",
    "Ａ ｒｅｄ ｃｉｒｃｌｅ，ｍｏｖｉｎｇ ｌｅｆｔ！",
    "a red &amp;amp; blue &lt;square&gt; &quot;moving&quot;",
    "schÃ¶n â€œquotedâ€\x9d \N{NO-BREAK SPACE}square",
    "色调艳丽，过曝，静态 🙂 a",
    " ".join(WORDS * 4),
]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """A WanPipeline read back from a folder in the layout of the released models."""
    folder = tmp_path_factory.mktemp("pipeline")
    vocab = runpy.run_path(str(SCRIPT))["build_tiny_tokenizer"](WORDS, folder / "tokenizer")
    torch.manual_seed(0)
    diffusers.WanPipeline(
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder=transformers.UMT5EncoderModel(
            transformers.UMT5Config(
                vocab_size=vocab, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4
            )
        ),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=1,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=8,
            ffn_dim=8,
            num_layers=1,
        ),
        vae=diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
        ),
        scheduler=diffusers.UniPCMultistepScheduler(),
    ).save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "T5TokenizerFast"]  # as in the released folders
    (folder / "model_index.json").write_text(json.dumps(index))
    return diffusers.WanPipeline.from_pretrained(folder), text.load_tokenizer(folder / "tokenizer")


def fake_encode(ids_BS, mask_BS):
    """Row j of a prompt is (id, position), so results can be read off."""
    position_BS = np.broadcast_to(np.arange(ids_BS.shape[1]), ids_BS.shape)
    return np.stack([ids_BS, position_BS], -1).astype(np.float32) + 1


def test_clean_gives_the_text_wan_was_trained_on():
    assert (
        text.clean("Ａ ｃａｔ，ｒｕｎｓ！ &amp;lt;3 &amp;amp;\u3000 ok\n") == "A cat,runs! <3 & ok"
    )
    assert text.clean("âœ” donâ€™t") == "✔ don't"
    assert [text.clean(p) for p in PROMPTS] == [pipeline_wan.prompt_clean(p) for p in PROMPTS]


def test_ids_and_mask_equal_those_of_the_diffusers_pipeline(pipeline):
    pipe, tokenizer = pipeline
    want = pipe.tokenizer(
        [pipeline_wan.prompt_clean(p) for p in PROMPTS],
        padding="max_length",
        max_length=512,
        truncation=True,
        return_tensors="np",
    )
    ids_BS, mask_BS = text.tokenize(tokenizer, PROMPTS)
    np.testing.assert_array_equal(ids_BS, want.input_ids)
    np.testing.assert_array_equal(mask_BS, want.attention_mask)
    assert ids_BS.dtype == np.int32 and mask_BS.dtype == bool


def test_auto_tokenizer_reads_the_tiny_folder_the_same(pipeline):
    pipe, tokenizer = pipeline
    auto = transformers.AutoTokenizer.from_pretrained(pathlib.Path(pipe.name_or_path) / "tokenizer")
    for prompt in PROMPTS:
        assert auto(prompt).input_ids == tokenizer.encode(prompt).ids
    assert (auto.pad_token_id, auto.eos_token_id, auto.unk_token_id) == (0, 1, 2)


def test_tiny_tokenizer_has_words_characters_and_unknowns(pipeline):
    _, tokenizer = pipeline
    assert tokenizer.encode("a red circle").tokens == ["▁a", "▁red", "▁circle", "</s>"]
    assert tokenizer.encode("a red circle").ids == [4, 5, 7, 1]
    assert tokenizer.encode("reds 🙂").tokens == ["▁red", "s", "▁", "🙂", "</s>"]
    assert tokenizer.encode("reds 🙂").ids[-2] == 2
    assert tokenizer.get_vocab_size() == 4 + len(WORDS) + 94


def test_embeddings_equal_those_of_the_diffusers_pipeline(pipeline):
    pipe, tokenizer = pipeline
    with torch.no_grad():
        want, _ = pipe.encode_prompt(
            PROMPTS, do_classifier_free_guidance=False, max_sequence_length=512
        )

        def encode(ids_BS, mask_BS):
            out = pipe.text_encoder(torch.from_numpy(ids_BS).long(), torch.from_numpy(mask_BS))
            return out.last_hidden_state.numpy()

        got = text.encode_prompts(encode, tokenizer, PROMPTS, batch=2)
    assert got.shape == (len(PROMPTS), 64, 16)
    np.testing.assert_allclose(got, want[:, :64], atol=1e-5)
    assert not want[:, 64:].any()
    beyond = ~text.tokenize(tokenizer, PROMPTS)[1][:, :64]
    assert beyond.any() and not got[beyond].any()


def test_long_prompt_is_cut_like_in_transformers_and_named(pipeline, capsys):
    pipe, tokenizer = pipeline
    long = "a blue square moving right " * 3
    want = pipe.tokenizer(long, max_length=8, truncation=True).input_ids
    ids_BS, mask_BS = text.tokenize(tokenizer, ["a red circle", long], length=8)
    assert ids_BS[1].tolist() == want and want[-1] == 1
    assert mask_BS.sum(1).tolist() == [4, 8]
    out = capsys.readouterr().out
    assert "sees 8 of 16 tokens of 'a blue square" in out and "red circle" not in out
    text.tokenize(tokenizer, ["a " * 511])
    assert capsys.readouterr().out == ""


def test_bytes_outside_the_vocabulary_are_kept(tmp_path):
    """umT5's own file has byte fallback; it must survive loading."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(f"<0x{i:02X}>", 0.0) for i in range(256)] + [("▁", -2.0), ("▁a", -1.0)]
    file = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=2, byte_fallback=True))
    file.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    file.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    file.enable_padding(length=7)  # a file may carry these; they must not reach the ids
    file.enable_truncation(4)
    file.save(str(tmp_path / "tokenizer.json"))
    ids_BS, mask_BS = text.tokenize(text.load_tokenizer(tmp_path), ["a é"], length=8)
    assert ids_BS.tolist() == [[260, 259, 3 + 0xC3, 3 + 0xA9, 1, 0, 0, 0]]
    assert mask_BS.sum() == 5


@pytest.mark.parametrize(
    "tokens, S", [(1, 32), (32, 32), (33, 64), (480, 480), (481, 512), (512, 512)]
)
def test_bucket_is_the_next_multiple_of_32(tokens, S):
    assert text.bucket(tokens) == S


def test_bucket_never_exceeds_the_length():
    assert text.bucket(3, length=20) == 20


def test_equal_prompts_are_encoded_once_in_few_shapes(pipeline):
    _, tokenizer = pipeline
    calls = []

    def encode(ids_BS, mask_BS):
        calls.append(ids_BS)
        return fake_encode(ids_BS, mask_BS)

    long = " ".join(WORDS * 4)
    cache = {}
    prompts = ["a red circle", long, "a red circle", "a blue square", "a"]
    first = text.encode_prompts(encode, tokenizer, prompts, batch=3, cache=cache)
    assert [ids.shape for ids in calls] == [(3, 32), (3, 64)]
    assert first.shape == (5, 64, 2)
    np.testing.assert_array_equal(first[0], first[2])
    np.testing.assert_array_equal(first[0, :5], [[5, 1], [6, 2], [8, 3], [2, 4], [0, 0]])

    again = text.encode_prompts(encode, tokenizer, ["a", "a red circle"], batch=3, cache=cache)
    assert len(calls) == 2 and again.shape == (2, 32, 2)
    np.testing.assert_array_equal(again[1], first[0, :32])
    np.testing.assert_array_equal(again[0], first[4, :32])


@pytest.mark.parametrize("prompts", [[], "a red circle", ()])
def test_no_prompts_or_a_bare_string_is_an_error(pipeline, prompts):
    _, tokenizer = pipeline
    with pytest.raises(ValueError, match="a list of at least one prompt, got"):
        text.encode_prompts(fake_encode, tokenizer, prompts)
    with pytest.raises(ValueError, match="a list of at least one prompt, got"):
        text.tokenize(tokenizer, prompts)


@pytest.mark.parametrize("value, word", [(0.0, "zeros"), (np.nan, "NaN or infinity")])
def test_broken_encoder_is_an_error_that_names_the_prompt(pipeline, value, word):
    _, tokenizer = pipeline
    broken = lambda ids_BS, mask_BS: np.full((*ids_BS.shape, 2), value, np.float32)
    with pytest.raises(ValueError, match=f"'a red' encodes to {word} .largest token id 5"):
        text.encode_prompts(broken, tokenizer, ["a red"])


def test_missing_unreadable_or_foreign_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer at .*nowhere.tokenizer.json; expected"):
        text.load_tokenizer(tmp_path / "nowhere")
    file = tmp_path / "tokenizer.json"
    file.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="is not a tokenizer file .*; download it again"):
        text.load_tokenizer(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, "<unk>")).save(str(file))
    with pytest.raises(ValueError, match=r"is not a T5 tokenizer: .* 'a' gives ids \[0\]"):
        text.load_tokenizer(tmp_path)


def test_a_tokenizer_in_an_object_store_is_read(bucket, tmp_path):
    runpy.run_path(str(SCRIPT))["build_tiny_tokenizer"](WORDS, tmp_path)
    path = emulator.upload(tmp_path, bucket / "tokenizer")
    want = text.tokenize(text.load_tokenizer(tmp_path), PROMPTS)
    for a, b in zip(text.tokenize(text.load_tokenizer(str(path)), PROMPTS), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_words_with_spaces_are_refused(tmp_path):
    build = runpy.run_path(str(SCRIPT))["build_tiny_tokenizer"]
    with pytest.raises(ValueError, match="free of whitespace and '▁', got 'red circle'"):
        build(["a", "red circle"], tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def test_contexts_are_padded_to_one_length_for_all_prompts(model):
    params, config = setups.load_model(model)
    long = "red circle " * 20
    encode = text.Encoder(config, ["", long], params["text_encoder"])
    assert encode([""]).shape == encode([long]).shape == (1, 40, 24)
    assert not encode(["red"])[0, -1].any() and encode(["red"])[0, 0].any()


def test_rows_in_a_folder_survive_and_damaged_ones_count_as_absent(tmp_path, rng):
    rows = {name: rng.normal(size=(3 + k, 8)).astype(np.float32) for k, name in enumerate("abc")}
    folder = text.Folder(tmp_path / "rows", 8, np.float32)
    folder.update(rows)
    again = text.Folder(tmp_path / "rows", 8, np.float32)
    assert len(again) == 3 and "d" not in again
    for name, row_SE in rows.items():
        np.testing.assert_array_equal(again[name], row_SE)
    for file in (tmp_path / "rows").glob("*/*"):
        data = bytearray(file.read_bytes())
        data[10] ^= 1
        file.write_bytes(bytes(data))
    fresh = text.Folder(tmp_path / "rows", 8, np.float32)
    assert not any(name in fresh for name in rows)
    fresh["a"] = rows["a"]
    np.testing.assert_array_equal(fresh["a"], rows["a"])


def test_rows_in_memory_are_bounded(tmp_path):
    folder = text.Folder(tmp_path, 4, np.float32, memory=1000)
    for number in range(50):
        folder[str(number)] = np.full((5, 4), number, np.float32)  # 80 bytes
        assert folder[str(number)][0, 0] == number
    assert folder._held <= 1000 and len(folder._recent) == 12 and len(folder) == 50
    assert folder["0"][0, 0] == 0  # from its file


def test_each_prompt_is_encoded_once_and_then_no_encoder_is_needed(model, tmp_path):
    params, config = setups.load_model(model)
    prompts = ["", "red circle", "blue", "blue"]
    rows = text.Folder(tmp_path, 24, np.float32)
    first = text.Encoder(config, prompts, params["text_encoder"], rows)
    assert sorted(first.missing(prompts)) == sorted(set(prompts))
    want = first(prompts)
    later = text.Encoder(config, prompts, rows=text.Folder(tmp_path, 24, np.float32))
    assert later.missing(prompts) == []
    np.testing.assert_array_equal(later(prompts), want)
    plain = text.Encoder(config, prompts, params["text_encoder"])
    np.testing.assert_allclose(plain(prompts), want, atol=1e-6)
