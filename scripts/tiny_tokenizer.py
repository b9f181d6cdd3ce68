"""Write the tokenizer folder of a tiny Wan model: a T5 tokenizer over a small set of words.

    python scripts/tiny_tokenizer.py FOLDER a red circle moving left ...

Ids: <pad> 0, </s> 1 (appended to every prompt), <unk> 2, "▁" 3 (a word start), then the words, then
printable ASCII. A word outside the list is split into characters; other characters are <unk>.
Only features that transformers' T5Tokenizer keeps when it rebuilds a tokenizer.json are used
(a Unigram model; neither byte fallback nor lowercasing survives), so diffusers' WanPipeline and
wanjax.data.text give the same ids.
"""

import string
import sys

import transformers


def build_tiny_tokenizer(words: list[str], folder) -> int:
    """Write tokenizer.json and its configuration to folder; return the vocabulary size."""
    words = list(dict.fromkeys(words))
    bad = [word for word in words if not word or any(c.isspace() or c == "▁" for c in word)]
    if bad:
        raise ValueError(f"words must be free of whitespace and '▁', got {bad[0]!r}")
    characters = string.ascii_letters + string.digits + string.punctuation
    # The path with the highest total score wins: a whole word beats its characters.
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocab += [(f"▁{word}", -1.0) for word in words]
    vocab += [(character, -4.0) for character in characters]
    tokenizer = transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return len(vocab)


if __name__ == "__main__":
    print(f"{build_tiny_tokenizer(sys.argv[2:], sys.argv[1])} tokens in {sys.argv[1]}")
