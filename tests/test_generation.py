"""Generation: the cache, sampling, the ends of rows, and text that never breaks inside a character."""

import codecs

import pytest
import torch
from conftest import logits, random_documents, random_model, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

import train_small as ts


@pytest.fixture(scope="module")
def generator(dataset):
    return ts.Generator(random_model(tiny_config()), dataset.tokenizer)


def argmax_loop(generator, prompt, max_tokens, stop=()):
    """Reference: the whole text through the full forward for every new token."""
    ids, new = list(prompt), []
    for _ in range(max_tokens):
        token = logits(generator.model, ids)[-1, : generator.tokenizer.vocab_size].argmax().item()
        if token in (*stop, generator.tokenizer.bos_id):
            break
        ids, new = [*ids, token], [*new, token]
    return new


PROMPTS = random_documents((3, 20, 9, 1), vocab=290)


@pytest.mark.parametrize("chunk", (512, 9, 4, 1))
def test_greedy_batch_equals_uncached_loop(generator, chunk):
    """Prompts of different lengths in one batch, prefilled in chunks, give what each gives alone without a cache."""
    options = {"max_tokens": 40, "temperature": 0.0, "chunk": chunk}
    together = generator.generate(PROMPTS, **options)
    assert together == [argmax_loop(generator, prompt, 40) for prompt in PROMPTS]
    assert together == [generator.generate([prompt], **options)[0] for prompt in PROMPTS]
    assert max(map(len, together)) == 40, "the windows are 8 and 16"


def test_stop_tokens_and_bos_end_a_row(generator):
    """A row ends before its first stop token, the others go on; a sampled BOS always ends it."""
    plain = generator.generate(PROMPTS, max_tokens=12, temperature=0.0)
    stop = plain[1][3]
    stopped = generator.generate(PROMPTS, max_tokens=12, temperature=0.0, stop=(stop,))
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in plain] and len(stopped[1]) <= 3
    steps = list(generator.stream(PROMPTS[1:2], max_tokens=12, temperature=0.0, stop=(stop,)))
    assert steps[-1] == [None] and len(steps) == len(stopped[1]) + 1, "nothing is computed after the last row ended"
    bos = generator.tokenizer.bos_id
    tokenizer = type("", (), {"bos_id": stop, "vocab_size": 300})()
    assert ts.Generator(generator.model, tokenizer).generate(PROMPTS[1:2], max_tokens=12, temperature=0.0) == [
        stopped[1]
    ]
    assert all(bos not in row for row in generator.generate(PROMPTS, max_tokens=40, temperature=5.0, top_k=0))


def test_padding_of_the_vocabulary_is_never_sampled(generator):
    """Ids beyond the tokenizer's do not appear, however likely the model finds them."""
    model = random_model(tiny_config())
    with torch.no_grad():
        model.head[300:] = 50 * model.head[:20]
    rows = ts.Generator(model, generator.tokenizer).generate(PROMPTS, max_tokens=30, temperature=3.0, top_k=0)
    assert max(max(row) for row in rows if row) < 300


def frequencies(values, draws=20000, **options):
    """Counts over many equal rows; the ids are shuffled so that order in the vocabulary does not help."""
    row = torch.tensor(values, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
    drawn = ts.sample(row.repeat(draws, 1), rng=rng, **options)
    return torch.bincount(drawn, minlength=len(values)).double()


LOGITS = [0.3, 2.0, -1.0, 1.2, 0.9, -30.0]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"temperature": 0.5}, {0, 1, 2, 3, 4}),
        ({"temperature": 2.0}, {0, 1, 2, 3, 4}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 50}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {1, 3}),  # 0.49 does not reach a half, with 0.22 it does
        ({"top_p": 0.45}, {1}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # of the three best: 0.57, 0.83
        ({"top_p": 0.8, "temperature": 2.0}, {0, 1, 3, 4}),  # flatter: 0.34, 0.57, 0.76, 0.90
    ],
)
def test_sampling_has_the_exact_distribution(options, kept):
    """Only the kept entries appear, as often as softmax(logits / temperature) over them says (chi square)."""
    counts, kept = frequencies(LOGITS, **options), sorted(kept)
    weights = (torch.tensor(LOGITS, dtype=torch.float64) / options.get("temperature", 1.0)).exp()[kept]
    expected = weights / weights.sum() * 20000
    assert counts.sum() == counts[kept].sum() == 20000
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 20  # 4 degrees of freedom: p = 0.0005


def test_sampling_repeats_with_its_seed(generator):
    """Equal seeds, equal text; temperature 0 needs none."""
    rows = [generator.generate(PROMPTS, max_tokens=10, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]
    assert ts.sample(torch.tensor([[0.0, 3.0, 1.0]]), 0, 1, 1.0, None).tolist() == [1]


def pieces_of(generator, ids) -> list[str]:
    scripted = ts.Generator(generator.model, generator.tokenizer)
    scripted.stream = lambda prompts, **options: iter([[token] for token in ids])
    return list(scripted.stream_text("x"))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=20))
def test_streamed_text_never_breaks_a_character(generator, text):
    """Characters that arrive byte by byte come out whole."""
    pieces = pieces_of(generator, list(text.encode()))  # ids below 256 are bytes
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 290), max_size=20))
def test_streamed_pieces_add_up_to_the_decoded_text(generator, ids):
    """Also for bytes that are no text, and for tokens that hold parts of characters."""
    expected = codecs.decode(generator.tokenizer.decode_bytes(ids), "utf-8", "replace")
    assert "".join(pieces_of(generator, ids)) == generator.tokenizer.decode(ids) == expected


def test_stream_text_continues_the_prompt(generator):
    """The prompt goes in behind a BOS, and the pieces are the decoded greedy ids."""
    prompt = [generator.tokenizer.bos_id, *generator.tokenizer.encode("the rest")]
    expected = generator.tokenizer.decode(argmax_loop(generator, prompt, 15))
    assert "".join(generator.stream_text("the rest", max_tokens=15, temperature=0.0)) == expected


def test_context_overflow(generator):
    """A prompt of 60 leaves room for 5 of 64 (the newest token needs no place); the error says so."""
    (prompt,) = random_documents((60,), vocab=290)
    assert generator.generate([prompt], max_tokens=5, temperature=0.0) == [argmax_loop(generator, prompt, 5)]
    with pytest.raises(ts.UserError, match="60 tokens and 6 new ones exceed the context of 64.*at most 5"):
        generator.generate([prompt], max_tokens=6)
    with pytest.raises(ts.UserError, match="prompt is empty"):
        generator.generate([[]])
