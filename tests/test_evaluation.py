"""Bits per byte against sums made by hand."""

import hashlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import train_small as ts

from tiny import ALONE, CPU, random_model, tiny_config, validation_of, write_tokenizer


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
    ids, found = tokenizer.mergeable, tokenizer.prefix_ids()
    pairs = {b"the": b"th", b" the": b" t", b" and": b" a", b"and": b"an", "€".encode(): "€".encode()[:2], b"th": b"t"}
    assert {token: found[ids[token]] for token in pairs} == {token: ids[prefix] for token, prefix in pairs.items()}
    for i, token in enumerate(tokenizer.bytes[: len(ids)]):
        shorter = [other for other in ids if token.startswith(other) and other != token]
        assert found[i] == (ids[max(shorter, key=len)] if shorter else -1)
    assert found[:256] == [-1] * 256 and len(found) == 300
    assert {found[i] for i in tokenizer.specials.values()} == {-1}, "they are no text"


@pytest.mark.parametrize("packs", (1, 2, 4))
def test_bits_per_byte_by_hand(tokenizer, packs):
    """Known nats on a text of known bytes: a, é, half a €, an invalid byte, specials and ignored targets."""
    a, e_acute, half_euro, invalid = ord("a"), *(tokenizer.mergeable[b] for b in ("é".encode(), b"\xe2\x82")), 0xFF
    bos = tokenizer.bos_id
    nats_of = {a: 0.5, e_acute: 2.0, half_euro: 3.0, invalid: 7.0, bos: 100.0, -1: 0.0}
    config = tiny_config()
    documents = [([bos, a, e_acute, bos], [True] * 3), ([bos, half_euro, 1, invalid, a], [True, False, True, True]),
                 ([bos, bos], [True])]  # fmt: skip
    batch = ts.empty_packs(3, config, 0)
    for row, document in enumerate(documents):
        ts.fill_pack(batch, row, [tuple(map(np.array, document))])
    assert batch.total_targets == 7 and batch.targets[1, :5].tolist() == [half_euro, -1, invalid, a, -1]

    def model(tokens, targets, positions, cu_seqlens, max_doc):
        assert len(tokens) == packs * config.pack_tokens and cu_seqlens[-1] == len(tokens)
        nats = torch.tensor([nats_of[t] for t in targets.tolist()])
        return nats.sum(), nats

    token_bytes = torch.tensor(tokenizer.token_bytes, dtype=torch.long)
    bpb = ts.bits_per_byte(model, batch, packs, token_bytes, ALONE)
    nats, text_bytes = 0.5 + 2 + 3 + 7 + 0.5, 1 + 2 + 2 + 1 + 1
    assert bpb == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)


def test_what_is_scored_is_stated(tokenizer):
    """Targets and bytes by hand; documents without a target, and those beyond val_tokens, are not in it."""
    bos, the = tokenizer.bos_id, tokenizer.mergeable[b" the"]
    whole = (np.array([bos, the, 97, bos]), np.ones(3, bool))
    part = (np.array([bos, the, 97]), np.array([False, True]))
    empty = (np.array([bos]), np.ones(0, bool))
    config = tiny_config(val_tokens=5)
    scored = ts.scored_documents(iter([whole, empty, part, whole]), config)
    assert [len(counted) for _, counted in scored] == [3, 2]
    tokens = np.array([bos, the, 97, bos, bos, the, 97], "<u2").tobytes()
    expected = {"targets": 3, "bytes": 4 + 1 + 1, "sha256": hashlib.sha256(tokens).hexdigest()}
    job = SimpleNamespace(config=config, tokenizer=tokenizer)
    ts.Pretraining.set_validation(job, iter([whole, empty, part, whole]))
    assert job.scored == expected
    with pytest.raises(ts.UserError, match="has no validation text to score"):
        ts.Pretraining.set_validation(job, iter([empty]))


@pytest.fixture(scope="module")
def validation(dataset):
    """(config, a model, the validation split of a dataset, bytes of its tokens)"""
    config = tiny_config()
    token_bytes = torch.zeros(config.padded_vocab, dtype=torch.long)
    token_bytes[:300] = torch.from_numpy(dataset.tokenizer.token_bytes)
    return config, random_model(config), validation_of(dataset, config), token_bytes


@pytest.mark.parametrize("world", (2, 3))
def test_bits_per_byte_of_several_ranks(validation, monkeypatch, world):
    """The ranks' shares are whole micro-batches that together hold every target once; the sums are those of one."""
    _, model, batch, token_bytes = validation
    alone = ts.bits_per_byte(model, batch, 2, token_bytes, ALONE)
    with pytest.raises(ZeroDivisionError):  # no bytes are no score
        ts.bits_per_byte(model, batch, 2, token_bytes * 0, ALONE)

    ranks = [ts.Ranks(rank, world, CPU) for rank in range(world)]
    shares = [ts.share_of_rank(batch, 2, rank) for rank in ranks]
    assert {len(share.tokens) for share in shares} == {-(-len(batch.tokens) // (2 * world)) * 2}
    targets = torch.cat([share.targets for share in shares])
    assert torch.equal(targets[: len(batch.targets)], batch.targets) and (targets[len(batch.targets) :] == -1).all()

    sums = []
    # One rank may have no bytes, so those of the others are added.
    monkeypatch.setattr(ts.dist, "all_reduce", lambda tensor: sums.append(tensor.clone()) or tensor.add_(1))
    for rank in ranks:
        ts.bits_per_byte(model, batch, 2, token_bytes, rank)
    nats, text_bytes = torch.stack(sums).sum(0).tolist()
    assert nats / math.log(2) / text_bytes == pytest.approx(alone, rel=1e-5)
