"""Prompts to text embeddings, exactly as Wan does it.

    clean:    ftfy → html unescape twice → strip → collapse whitespace → strip
    tokenize: sentencepiece pieces, </s> appended, cut at 512 tokens, padded on the right
    encode:   the text encoder under the padding mask; rows beyond the prompt are zero

The DiT counts missing rows as zero rows, so a context is trimmed to the few lengths of `bucket`
instead of carrying 512 rows.

B prompts  S text tokens  E text width
"""

import collections
import collections.abc
import functools
import hashlib
import html
import os
import pathlib
import re
import time
import zlib

import ftfy
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from wanjax import paths
from wanjax.models import presets, umt5
from wanjax.parallel import distributed, sharding

LENGTH = 512  # every Wan model was trained with it; diffusers' encode_prompt defaults to 226
_BUCKET = 32  # contexts are multiples of this many rows, so that few shapes are compiled
BATCH = 8  # prompts per call of the encoder
_PART = 64  # prompts encoded between two looks at the clock


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
    path = paths.resolve(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"no tokenizer at {path}; expected the tokenizer folder of a Wan model in diffusers "
            "layout (google/umt5-xxl in the original one); set model.path to a complete download"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
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


def encode_prompts(encode, tokenizer, prompts, *, length=LENGTH, batch=BATCH, cache=None):
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


class Encoder:
    """Prompts -> ctx_PSE (numpy, in the encoder's dtype) by a model's own tokenizer and encoder.

    Every prompt is encoded once; several processes call `fill` and the encoder together.
    """

    def __init__(self, model: presets.ModelConfig, prompts, params=None, rows=None):
        """prompts: all that will be asked for; the longest one sets S, so that everything compiles
        once. params: of the text encoder; None where `rows` has all. rows: a mapping prompt ->
        rows to fill and read, such as Folder."""
        self.params, self.rows = params, {} if rows is None else rows
        self._tokenizer, self._length = load_tokenizer(model.tokenizer), model.wan.text_len
        cleaned = [clean(prompt) for prompt in dict.fromkeys(prompts)]
        longest = max(len(found.ids) for found in self._tokenizer.encode_batch(cleaned))
        self._rows = bucket(min(longest, self._length), self._length)
        self._run = jax.jit(functools.partial(umt5.encode, config=model.text))

    def missing(self, prompts) -> list[str]:
        """Those of the prompts that a process of this run has no rows of, shortest first."""
        prompts = list(dict.fromkeys(prompts))
        lacking = "".join(str(int(prompt not in self.rows)) for prompt in prompts)
        found = distributed.gather(lacking) if jax.process_count() > 1 else [lacking]
        needed = [p for p, *bits in zip(prompts, *found, strict=True) if "1" in bits]
        return sorted(needed, key=len)

    def fill(self, prompts) -> None:
        """Encode what is missing, with a line about the progress every few seconds."""
        needed, started, shown = self.missing(prompts), time.monotonic(), time.monotonic()
        for first in range(0, len(needed), _PART):
            part: dict = {}
            encode_prompts(
                self._encode, self._tokenizer, needed[first : first + _PART],
                length=self._length, cache=part,
            )  # fmt: skip
            self.rows.update(part)
            done, now = min(first + _PART, len(needed)), time.monotonic()
            if now - shown > 5 and jax.process_index() == 0:
                left = (len(needed) - done) * (now - started) / done / 60
                print(f"prompts  {done}/{len(needed)} encoded  ETA {left:.1f} min", flush=True)
                shown = now

    def __call__(self, prompts):
        if self.params is not None:
            self.fill(prompts)
        ctx_PSE = encode_prompts(
            self._encode, self._tokenizer, prompts, length=self._length, cache=self.rows
        )
        return np.pad(ctx_PSE, ((0, 0), (0, self._rows - ctx_PSE.shape[1]), (0, 0)))

    def _encode(self, ids_BS, mask_BS):
        return sharding.fetch(self._run(sharding.to_device(self.params), ids_BS, mask_BS))


class Folder(collections.abc.MutableMapping):
    """Prompt -> text rows [s, E] in files of a folder that belongs to one encoder and dtype; runs
    share it. The rows that were used last are also in memory, `memory` bytes of them.

    A file holds the crc32 of the rows, then the rows; one that is damaged counts as absent.
    """

    def __init__(self, folder, width: int, dtype, memory: int = 1 << 28):
        self._folder, self._width, self._dtype = pathlib.Path(folder), width, np.dtype(dtype)
        self._recent: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._memory, self._held = memory, 0

    def __getitem__(self, prompt: str) -> np.ndarray:
        if prompt in self._recent:
            self._recent.move_to_end(prompt)
            return self._recent[prompt]
        try:
            data = self._file(prompt).read_bytes()
        except OSError:
            raise KeyError(prompt) from None
        body = data[4:]
        whole = body and len(body) % (self._width * self._dtype.itemsize) == 0
        if not whole or zlib.crc32(body).to_bytes(4) != data[:4]:
            raise KeyError(prompt)
        row_SE = np.frombuffer(body, self._dtype).reshape(-1, self._width)
        self._remember(prompt, row_SE)
        return row_SE

    def __setitem__(self, prompt: str, row_SE) -> None:
        file, body = self._file(prompt), np.ascontiguousarray(row_SE, self._dtype).tobytes()
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.{os.getpid()}")  # processes may share the folder
        part.write_bytes(zlib.crc32(body).to_bytes(4) + body)
        os.replace(part, file)

    def __contains__(self, prompt) -> bool:
        try:
            return bool(len(self[prompt]))
        except KeyError:
            return False

    def __delitem__(self, prompt: str) -> None:
        self._file(prompt).unlink()
        self._held -= self._recent.pop(prompt, np.zeros(0)).nbytes

    def __iter__(self):
        raise TypeError("files are named by digests: prompts cannot be listed")

    def __len__(self) -> int:
        return sum(1 for _ in self._folder.glob("??/*"))

    def _file(self, prompt: str) -> pathlib.Path:
        name = hashlib.sha256(prompt.encode()).hexdigest()[:40]
        return self._folder / name[:2] / name

    def _remember(self, prompt: str, row_SE) -> None:
        self._recent[prompt] = row_SE
        self._held += row_SE.nbytes
        while self._held > self._memory and len(self._recent) > 1:
            self._held -= self._recent.popitem(last=False)[1].nbytes


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
