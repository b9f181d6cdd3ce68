"""Prompts to text embeddings, exactly as Wan does it.

    clean:    ftfy → html unescape twice → strip → collapse whitespace → strip
    tokenize: sentencepiece pieces, </s> appended, cut at 512 tokens, padded on the right
    encode:   the text encoder under the padding mask; rows beyond the prompt are zero

The DiT counts missing rows as zero rows, so a context is trimmed to the few lengths of `bucket`
instead of carrying 512 rows.

B prompts  S text tokens  E text width
"""

import functools
import html
import pathlib
import re

import ftfy
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from wanjax.models import presets, umt5
from wanjax.parallel import sharding

LENGTH = 512  # every Wan model was trained with it; diffusers' encode_prompt defaults to 226
_BUCKET = 32  # contexts are multiples of this many rows, so that few shapes are compiled


def clean(prompt: str) -> str:
    """Return the prompt as Wan's text encoder saw it in training; apply once, not twice."""
    prompt = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
    return re.sub(r"\s+", " ", prompt).strip()


def load_tokenizer(folder) -> tokenizers.Tokenizer:
    """Read folder/tokenizer.json as it stands.

    transformers 5 rebuilds it as its T5Tokenizer class, which drops byte fallback: characters
    outside the vocabulary (emoji, rare scripts) then become <unk> instead of the bytes that the
    model was trained on. Raises ValueError for a missing, unreadable or foreign file.
    """
    path = pathlib.Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"no tokenizer at {path}; expected the tokenizer folder of a Wan model in diffusers "
            "layout (google/umt5-xxl in the original one); set model.path to a complete download"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer file ({error}); download it again") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = tokenizer.encode("a").ids
    if tokenizer.token_to_id("<pad>") is None or ids[-1] != tokenizer.token_to_id("</s>"):
        raise ValueError(
            f"{path} is not a T5 tokenizer: expected tokens <pad> and </s> with </s> appended to a "
            f"prompt, but 'a' gives ids {ids}; take the tokenizer folder of the model"
        )
    return tokenizer


def tokenize(tokenizer, prompts: list[str], length: int = LENGTH):
    """Clean and tokenize; return (ids_BS int32, mask_BS bool) with S = length.

    Prompts longer than `length` are truncated (but keep </s>) and reported in a printed line.
    """
    _check_prompts(prompts)
    pad, eos = tokenizer.token_to_id("<pad>"), tokenizer.token_to_id("</s>")
    ids_BS = np.full((len(prompts), length), pad, np.int32)
    mask_BS = np.zeros((len(prompts), length), bool)
    encodings = tokenizer.encode_batch([clean(prompt) for prompt in prompts])
    for i, (prompt, ids) in enumerate(zip(prompts, (e.ids for e in encodings), strict=True)):
        if len(ids) > length:
            seen = f"the model sees {length} of {len(ids)} tokens of {prompt[:60]!r}…"
            print(f"prompts: {seen}; shorten the prompt", flush=True)
            ids = [*ids[: length - 1], eos]
        ids_BS[i, : len(ids)] = ids
        mask_BS[i, : len(ids)] = True
    return ids_BS, mask_BS


def bucket(tokens: int, length: int = LENGTH) -> int:
    """Round up to a multiple of 32, at most `length`."""
    return min(-(-tokens // _BUCKET) * _BUCKET, length)


def encode_prompts(encode, tokenizer, prompts, *, length=LENGTH, batch=8, cache=None):
    """Return ctx_BSE (numpy, the dtype of the encoder), zero beyond each prompt.

    S is the bucket of the longest prompt. Equal prompts are encoded once.

    Args:
        encode: (ids_BS, mask_BS) -> ctx_BSE, e.g. a jitted umt5.encode. It sees at most 16 shapes:
            `batch` rows and a bucket of tokens. On several hosts its result must be replicated.
        cache: dict prompt -> rows [s,E] to keep between calls; belongs to one encoder and length.
    Raises ValueError when the encoder gives zeros or non-finite values.
    """
    cache = {} if cache is None else cache
    _check_prompts(prompts)
    new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in cache]
    if new:
        ids_BS, mask_BS = tokenize(tokenizer, new, length)
        order = np.argsort(mask_BS.sum(1), kind="stable")  # similar lengths share a batch
        for start in range(0, len(new), batch):
            chosen = order[start : start + batch]
            S = bucket(int(mask_BS[chosen].sum(1).max()), length)
            rows = np.resize(chosen, batch)  # the last batch repeats prompts to keep its shape
            ctx_BSE = np.asarray(encode(ids_BS[rows, :S], mask_BS[rows, :S]))
            for i, row_SE in zip(chosen, ctx_BSE, strict=False):
                cache[new[i]] = _checked(row_SE[: mask_BS[i].sum()], new[i], ids_BS[i])
    found = [cache[prompt] for prompt in prompts]
    S = bucket(max(len(row_SE) for row_SE in found), length)
    ctx_BSE = np.zeros((len(found), S, found[0].shape[1]), found[0].dtype)
    for i, row_SE in enumerate(found):
        ctx_BSE[i, : len(row_SE)] = row_SE
    return ctx_BSE


def make_encoder(model: presets.ModelConfig, params: dict, prompts):
    """A function list of prompts -> ctx_PSE (numpy float32) by the model's own tokenizer and text
    encoder.

    prompts: all that will be asked for; the longest one sets S, so that everything compiles once.
    Encodings are cached.
    """
    tokenizer, length = load_tokenizer(model.tokenizer), model.wan.text_len
    _, mask = tokenize(tokenizer, list(dict.fromkeys(prompts)), length)
    S = bucket(int(mask.sum(1).max()), length)
    run = jax.jit(functools.partial(umt5.encode, config=model.text))
    cache: dict = {}

    def encode_rows(ids_BS, mask_BS):
        return sharding.fetch(run(params["text_encoder"], ids_BS, mask_BS))

    def encode(prompts):
        ctx_PSE = encode_prompts(encode_rows, tokenizer, prompts, length=length, cache=cache)
        ctx_PSE = np.pad(ctx_PSE, ((0, 0), (0, S - ctx_PSE.shape[1]), (0, 0)))
        return ctx_PSE.astype(np.float32)

    return encode


def align(*ctx):
    """Contexts [B,S,E] padded to the longest S with zero rows, which is what missing rows mean."""
    S = max(a.shape[1] for a in ctx)
    return tuple(jnp.pad(a, ((0, 0), (0, S - a.shape[1]), (0, 0))) for a in ctx)


def _check_prompts(prompts):
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(
            f"expected a list of at least one prompt, got {prompts!r}; "
            'for an empty prompt give [""], for a single one ["..."]'
        )


def _checked(row_SE, prompt, ids_S):
    finite = np.isfinite(row_SE.astype(np.float32)).all()
    if not finite or not row_SE.any():
        raise ValueError(
            f"prompt {prompt[:60]!r} encodes to {'zeros' if finite else 'NaN or infinity'} "
            f"(largest token id {ids_S.max()}); tokenizer and text encoder must come from one "
            "model folder with complete weights; check model.path"
        )
    return row_SE
