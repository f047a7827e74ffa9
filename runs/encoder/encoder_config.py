"""The Config of an encoder, which needs no PyTorch."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Every number of a run; fields with a description are flags. Unknown names are ignored.

    train_small.py's loop, loader and optimizer read it as they read their own Config.
    """

    num_layers: int = Field(12, ge=1, description="number of layers; overrides --size")
    width: int = Field(768, ge=1, description="width of the hidden states")
    # Faster than 64, with the same loss.
    head_dim: int = Field(128, ge=1, description="width of an attention head")
    mlp_width: int = Field(2048, ge=1, description="hidden width of the SwiGLU")
    max_seq_len: int = Field(1024, ge=2, description="tokens in a document; longer ones are split")
    rotary_base: float = 10000.0
    vocab_size: int = 0  # entries of the tokenizer, and the mask token

    data: str = Field("data/shards/climbmix", description="dataset directory")
    mask_rate: float = Field(0.2, gt=0, lt=1, description="fraction of tokens to mask")
    pack_tokens: int = Field(8192, ge=1, description="tokens in a pack of documents")
    # Attention costs time for this many, present or not.
    max_docs_per_pack: int = Field(64, ge=1, description="maximum number of documents in a pack")
    packs: int = Field(16, ge=1, description="packs per step, over all GPUs")
    max_epochs: int = Field(1, ge=1, description="maximum number of passes over the text")
    val_tokens: int = Field(1_048_576, ge=1, description="number of held-out tokens to score")

    steps: int = Field(2600, ge=1, description="optimizer steps")
    muon_lr: float = Field(0.02, gt=0, description="learning rate of matrices (NorMuon)")
    adam_lr: float = Field(0.006, gt=0, description="learning rate of the embedding (Adam)")
    muon_beta2: float = 0.9
    adam_eps: float = 1e-10
    momentum: tuple = (0.85, 0.95, 300, 50)  # from, to, warm-up steps, cool-down steps
    cooldown: float = 0.6  # fraction of the run over which the learning rates fall
    lr_floor: float = 0.0  # what they fall to, as a fraction of the first

    seed: int = Field(0, ge=0, description="seed of weights and masks")
    eval_every: int = Field(250, ge=0, description="steps between evaluations, 0: only at the end")
    save_every: int = Field(0, description="steps between checkpoints, 0: only at the end")
    log_every: int = Field(10, ge=1, description="steps between lines of the log")
    keep_checkpoints: int = 2
    micro_batch_tokens: int = Field(0, ge=0, description="tokens of a micro-batch, 0: 65,536 on a GPU, else 8,192")
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="dtype: auto, bfloat16 or float32")
    compile: bool = Field(True, description="compile the model; --no-compile starts quicker, its steps are slower")

    # Not fields: train_small.py reads them from its own Config.
    wandb = ""
    average = 0.0
    bigram_rows = 0

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // 64) * 64

    @property
    def num_steps(self) -> int:
        return self.steps

    @property
    def step_tokens(self) -> int:
        return self.packs * self.pack_tokens

    @property
    def tokens(self) -> int:
        return self.steps * self.step_tokens

    @property
    def stage_table(self) -> tuple:
        """What the schedule and the loader of train_small.py ask for: an encoder's run has one stage."""
        from train_small import Stage  # with PyTorch, for which --help need not wait

        return (Stage(1.0, self.packs, 1.0),)
