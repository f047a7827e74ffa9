"""Decoding with a trained model: KV cache, sampling, continuous batching.

    run = engine.load_run("out/RUN")
    generator = engine.Generator(run.model, run.tokenizer)
    for delta in generator.stream_text("The sky is", max_tokens=100, temperature=0.8):
        print(delta, end="")

Read the files in this order: load, completion, cache, prefill, kernel, sampling, scheduler.

A Completion is one prompt, its options and its result. Generator.run puts completions into the rows of a Decoder;
when one ends, the next takes its row. Decoder.add_requests prefills what the KV cache lacks of a prompt (PrefixCache
knows what it has), and Decoder.step gives every running row one more token: decode computes logits, and sample picks
a token from them. On CUDA both are graphs over the tensors of RowState, and the next step is launched before the
host reads the tokens of the last (PendingStep). prefill and decode are both GPT.trunk(attend), which computes
everything but attention, with an `attend` that reads and writes the KVCache.

The model is the GPT class of the script that lies in the run directory. This package imports no training script of the
repository, so a run keeps decoding as it was trained.

Letters in shape comments: B rows of the cache, S slots of a row's ring, T new tokens of a prefill, P its packed
tokens (old and new), N its sequences, D model width, H heads, K head width, V vocabulary (of the tokenizer).
"""

# ruff: noqa: F401  (what other programs use of this one)
from engine.cache import MIN_SHARED_PREFIX, KVCache
from engine.completion import Completion, StepOutput, TokenLogprob
from engine.kernel import decode
from engine.load import INTERFACE, Run, choose_device, import_script, load_run
from engine.prefill import NEW_BUCKETS, PREFILL_TOKENS
from engine.scheduler import SEED_STRIDE, Decoder, Generator
