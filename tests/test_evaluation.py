"""Bits per byte against sums made by hand."""

import math

import pytest
import torch
import train_small as ts

from conftest import ALONE, pack, random_model, tiny_config, write_tokenizer


def as_batch(config, tokens, targets) -> ts.Batch:
    """One document for each pack, the rest of the pack ignored."""
    packs = ts.empty_packs(len(tokens), config, 0)
    for row, (inputs, outputs) in enumerate(zip(tokens, targets, strict=True)):
        end = ts.place(packs, row, 0, 0, [*inputs, outputs[-1]])
        packs[1][row, :end] = outputs
        ts.pad_pack(packs, row, 1, end, config.max_seq_len)
    return ts.Batch(*map(torch.from_numpy, packs), config.max_seq_len, packs[0].size, sum(map(len, targets)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(path)
    return ts.Tokenizer(path)


def test_bytes_of_a_token_are_raw_bytes(tokenizer):
    """Two for é, three for €, one for a byte that is no text alone, none for specials whatever their name."""
    euro, half_euro, special = tokenizer.mergeable["€".encode()], tokenizer.mergeable[b"\xe2\x82"], tokenizer.bos_id
    ids = [ord("a"), tokenizer.mergeable["é".encode()], euro, half_euro, 0xFF, special]
    assert tokenizer.token_bytes[ids].tolist() == [1, 2, 3, 2, 1, 0]
    assert tokenizer.decode_bytes(ids) == b"a\xc3\xa9\xe2\x82\xac\xe2\x82\xff<|bos|>"
    text = "naïve é € 你好 the <|bos|>"
    assert tokenizer.decode_bytes(tokenizer.encode(text)).decode() == text
    assert sum(tokenizer.token_bytes[tokenizer.encode(text)]) == len(text.encode())
    assert tokenizer.bos_id not in tokenizer.encode(text), "a special in a text stays text"
    assert not tokenizer.token_bytes[list(tokenizer.specials.values())].any()


def test_prefixes(tokenizer):
    """The longest shorter token that a token begins with; " th" is none here, so that of " the" is " t"."""
    ids, found = tokenizer.mergeable, tokenizer.prefixes()
    pairs = {b"the": b"th", b" the": b" t", b" and": b" a", b"and": b"an", "€".encode(): "€".encode()[:2], b"th": b"t"}
    assert {token: found[ids[token]] for token in pairs} == {token: ids[prefix] for token, prefix in pairs.items()}
    for i, token in enumerate(tokenizer.bytes[: len(ids)]):
        shorter = [other for other in ids if token.startswith(other) and other != token]
        assert found[i] == (ids[max(shorter, key=len)] if shorter else -1)
    assert found[:256] == [-1] * 256 and len(found) == 300


@pytest.mark.parametrize("packs", (1, 2, 3, 4))
def test_bits_per_byte_by_hand(tokenizer, packs):
    """Known nats on a text of known bytes: a, é, half a €, an invalid byte, specials and ignored targets."""
    a, e_acute, half_euro, invalid = ord("a"), *(tokenizer.mergeable[b] for b in ("é".encode(), b"\xe2\x82")), 0xFF
    bos = tokenizer.bos_id
    targets = [[a, e_acute, bos], [half_euro, -1, invalid, a], [bos]]
    nats_of = {a: 0.5, e_acute: 2.0, half_euro: 3.0, invalid: 7.0, bos: 100.0, -1: 0.0}
    config = tiny_config()
    batch = as_batch(config, [[bos, a, e_acute], [bos, half_euro, 1, invalid], [bos]], targets)

    def model(tokens, targets, positions, cu_seqlens, max_doc):
        assert len(tokens) == packs * config.pack_tokens and cu_seqlens[-1] == len(tokens)
        nats = torch.tensor([nats_of[t] for t in targets.tolist()])
        return nats.sum(), nats

    token_bytes = torch.tensor(tokenizer.token_bytes, dtype=torch.long)
    bpb = ts.bits_per_byte(model, batch, packs, token_bytes, ALONE)
    nats, text_bytes = 0.5 + 2 + 3 + 7 + 0.5, 1 + 2 + 2 + 1 + 1
    assert bpb == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)


def test_bits_per_byte_of_a_model(dataset):
    """The validation split of a dataset: each document alone, summed in float64, and any number of packs at a time."""
    config = tiny_config()
    model, batch = random_model(config), validation_of(dataset, config)
    token_bytes = torch.zeros(config.padded_vocab, dtype=torch.long)
    token_bytes[:300] = torch.from_numpy(dataset.tokenizer.token_bytes)
    found = [ts.bits_per_byte(model, batch, packs, token_bytes, ALONE) for packs in (1, 2, 5, 100)]
    nats = text_bytes = 0.0
    text = dataset.read(dataset.files("val")[0]).astype(int).tolist()
    starts = [i for i, token in enumerate(text) if token == dataset.tokenizer.bos_id]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        document = text[start:end][: config.max_seq_len]
        if len(document) > 1:
            size = torch.tensor([len(dataset.tokenizer.bytes[t]) for t in document[1:]])
            nats += model(*pack([document]))[1].double().sum().item()
            text_bytes += size.sum().item()
    assert found == pytest.approx([nats / math.log(2) / text_bytes] * 4, rel=1e-5)
