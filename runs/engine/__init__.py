"""Decoding with a trained model: KV cache, prefill, sampling, continuous batching.

    import engine  # from the top of the repository, in Python started with PYTHONPATH=runs
    run = engine.load_run("out/RUN")
    generator = engine.Generator(run.model, run.tokenizer)
    for delta in generator.stream_text("The sky is", max_tokens=100, temperature=0.8):
        print(delta, end="")

Read in this order:

    load.py        the script, the model and the tokenizer of a run directory
    completion.py  a request: prompt, options, result
    cache.py       keys and values of each slot; which ids they belong to
    prefill.py     a prompt's keys and values, in one pass
    kernel.py      one more token for each slot
    sampling.py    from logits to ids
    scheduler.py   the loop: Generator, Decoder, CUDA graphs

A slot is the place of one sequence in the KV cache. Decoder.add_requests prefills what a slot lacks of a prompt, and
Decoder.step gives each running slot a token, in four stages: schedule says which slots run, execute_model computes
logits, sample picks ids from them, and update reads these ids. prefill and decode are both GPT.trunk(attend), which
computes everything but attention, with an `attend` that reads and writes the KVCache.

The model is the GPT class of the script that lies in the run directory; its methods forward and trunk say what windows,
key offset and paired layers are. This package imports no training script of the repository, so a run keeps decoding as
it was trained.

Letters in shape comments: B slots, S cells of a slot's ring, T new tokens of a prefill, P its packed tokens (old and
new), N its sequences, D model width, H heads, K head width, V vocabulary (of the tokenizer).
"""

# ruff: noqa: F401  (what other programs use)
from engine.cache import MIN_SHARED_PREFIX, KVCache
from engine.completion import Completion, StepOutput, TokenLogprob
from engine.kernel import decode
from engine.load import INTERFACE, Run, choose_device, import_script, load_run
from engine.prefill import NEW_BUCKETS
from engine.scheduler import SEED_STRIDE, Decoder, Generator
