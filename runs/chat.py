"""Chat in the terminal, with a run directory or with any OpenAI-compatible server.

    python runs/chat.py out/RUN
    python runs/chat.py out/RUN --prompt "Why is the sky blue?" --temperature 0
    python runs/chat.py out/RUN_HF              (of runs/huggingface/finetune_hf.py, or any folder of save_pretrained)
    python runs/chat.py --endpoint http://127.0.0.1:8000 --model NAME   (key: OPENAI_API_KEY)

/help lists the commands; Ctrl-C ends an answer or empties the line. With a run directory, the KV cache is kept between
turns, so a turn computes only its own tokens. When the context is full, the oldest turns are dropped and a note says
so. A model that was not finetuned for chat continues the text instead. The exit code is 1 if a question from --prompt
or a pipe did not get a complete answer.
"""

import argparse
import contextlib
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

from lib.command import RunError, check_sampling, first_line, print_note, run_command

HELP = """\
/clear         forget the conversation
/retry         ask the last question again
/undo          forget the last question and its answer
/temperature X sampling temperature from now on
/system TEXT   new system message; without TEXT: none
/save FILE     add the conversation to FILE as one line of JSON, as data/sft.py reads it
/help          this list
/quit          end the chat (also Ctrl-D)
To start a message with a slash, type two. A line that ends with \\ continues on the next one."""
TIMEOUT = 300  # seconds without a word from the server
MAX_TOKENS = 512  # of an answer of a local model, unless --max-tokens says otherwise


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group(required=True).add_argument
    model("run_dir", metavar="RUN_DIR", nargs="?", type=Path, help="directory of a run or of an exported model")
    model("--endpoint", metavar="URL", help="address of an OpenAI-compatible server, instead of RUN_DIR")
    add = parser.add_argument
    add("--model", help="model name on the server (default: the first one)")
    add("--prompt", action="append", help="message to answer, repeatable: the turns of a conversation")
    add("--system", default="", help="system message, with instructions for the whole conversation")
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0: the most likely token [%(default)s]")
    add("--top-k", type=int, help="number of most likely tokens to sample from; 0: all (default: 50)")
    add("--top-p", type=float, default=1.0, help="total probability of the tokens to sample from [%(default)s]")
    add("--max-tokens", type=int, help=f"maximum tokens per answer (default: {MAX_TOKENS}, or the server's)")
    add("--seed", type=int, help="seed of the sampling (default: a random one)")
    add("--step", type=int, help="step of the checkpoint (default: the newest)")
    add("--device", help="cuda, mps or cpu (default: the best available)")
    add("--trust", action="store_true", help="execute the Python files of an exported model")
    args = parser.parse_args(argv)
    check_sampling(parser, args)
    if any(not text.strip() for text in args.prompt or ()):
        parser.error("--prompt is empty; pass a text")
    return args


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import engine
import torch
from lib import chat_format


class TooLong(RunError):
    """A conversation does not fit the context."""


# ==== where answers come from


class OwnModel:
    """A model in this process, whose context has `limit` tokens."""

    def __init__(self, args: argparse.Namespace, limit: int):
        self.limit = limit
        self.seed = random.randrange(2**32) if args.seed is None else args.seed
        self.max_tokens = args.max_tokens or MAX_TOKENS
        self.args = args
        self.turns = 0

    def sampling(self) -> dict:
        top_k = 50 if self.args.top_k is None else self.args.top_k
        return {"temperature": self.args.temperature, "top_k": top_k, "top_p": self.args.top_p}

    def fit(self, messages: list[dict]) -> list[int]:
        """The ids of a conversation, up to where the next answer starts. Raises: TooLong"""
        ids = self.render(messages)
        min_answer = 1  # tokens that must still fit
        if len(messages) > 2:  # there are older turns to drop
            min_answer = min(self.max_tokens, self.limit // 4)
        if len(ids) + min_answer > self.limit:
            raise TooLong(f"the message has {len(ids):,} tokens but the context is {self.limit:,}; shorten it")
        return ids


class Local(OwnModel):
    """A model of a run directory with the conversation in its KV cache."""

    def __init__(self, run_dir: Path, args: argparse.Namespace):
        run = engine.load_run(run_dir, args.step, args.device)
        # Imported now, since Ctrl-C during the first answer would leave it half imported.
        import torch._dynamo  # noqa: F401

        super().__init__(args, run.config.max_seq_len)
        self.model = run.model
        self.tokenizer = run.tokenizer
        self.decoder = engine.Decoder(run.model, run.tokenizer, 1)  # its slot keeps the conversation

        specials = run.tokenizer.specials
        self.chat = chat_format.is_chat_run(run_dir)
        if not self.chat:
            problem = "this is a base model, not finetuned for chat"
            print_note(f"note: {problem}, so it continues your text (see runs/finetune.py)")
        self.stops = tuple(specials[name] for name in specials.keys() - chat_format.CALL_TOKENS.keys())

    def render(self, messages: list[dict]) -> list[int]:
        contents = [(message["role"], message.get("ids", message["content"])) for message in messages]
        turns = chat_format.merge_turns(contents)
        if self.chat:
            return chat_format.render(self.tokenizer, turns)
        ids = [self.tokenizer.bos_id]
        for _, content in turns:
            ids += self.tokenizer.encode(content) if isinstance(content, str) else content
        return ids

    def reply(self, messages: list[dict], answer: dict, show: Callable) -> None:
        """Shows the pieces of the answer to a conversation. Its ids go to answer["ids"]. Raises: TooLong"""
        ids = self.fit(messages)
        seed = self.seed + (self.turns - 1) * engine.SEED_STRIDE
        options = {"seed": seed, "stop": self.stops, "tools": True, **self.sampling()}
        completion = engine.Completion(ids, self.max_tokens, **options)
        answer["ids"] = []
        detokenizer = chat_format.Detokenizer(self.tokenizer)
        try:
            self.decoder.add_requests({0: completion})
            while not completion.reason:
                (output,) = self.decoder.step()
                if output.token is not None:
                    answer["ids"].append(output.token)
                    for _, text in detokenizer.add(output.token, completion.forced[-1]):
                        show(text)
        finally:
            if not completion.reason:  # Ctrl-C may have come in the middle of a step
                self.decoder.evict(0)
        if completion.reason == "length":
            print_note(f"\n(cut after {completion.max_tokens:,} tokens)")
        for _, text in detokenizer.finish():
            show(text)


class Pretrained(OwnModel):
    """A folder that save_pretrained of transformers wrote, with a chat template."""

    def __init__(self, folder: Path, args: argparse.Namespace):
        device = engine.choose_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            command = "pip install -r runs/huggingface/requirements-hf.txt"
            raise RunError(f"{folder} needs transformers; {command}") from None
        if not args.trust and list(folder.glob("*.py")):
            raise RunError(f"{folder} contains Python files, which --trust executes; read them, then add --trust")
        options = {"local_files_only": True, "trust_remote_code": args.trust}  # without the latter transformers asks
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            self.model = AutoModelForCausalLM.from_pretrained(folder, **options)
        except (OSError, ValueError) as error:
            raise RunError(f"transformers cannot load {folder} ({first_line(error)})") from None
        if not self.tokenizer.chat_template:
            raise RunError(f"{folder} has no chat template, so it is not a chat model")
        super().__init__(args, self.model.config.max_position_embeddings)
        self.model.to(device)

    def render(self, messages: list[dict]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    def reply(self, messages: list[dict], answer: dict, show: Callable) -> None:
        """Shows the pieces of the answer to a conversation. Raises: TooLong, RunError"""
        from transformers import TextStreamer

        ids = self.fit(messages)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = lambda text, stream_end=False: show(text)
        max_tokens = min(self.max_tokens, self.limit - len(ids))
        settings = {"do_sample": False}
        if self.args.temperature > 0:
            settings = {"do_sample": True, **self.sampling()}
        torch.manual_seed(self.seed + self.turns - 1)
        tokens = torch.tensor([ids], device=self.model.device)
        settings |= {"attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
        try:
            self.model.generate(tokens, max_new_tokens=max_tokens, streamer=streamer, **settings)
        except Exception as error:
            raise RunError(f"transformers failed ({first_line(error)})") from None


def pretrained_folder(path: Path) -> Path | None:
    """The folder of save_pretrained at a path, itself or its model/; None for another run."""
    for folder in (path, path / "model"):
        config = folder / "config.json"
        if config.is_file() and '"model_type"' in config.read_text(encoding="utf-8"):
            return folder
    return None


class Remote:
    """A server that speaks the OpenAI chat protocol."""

    limit = None  # unknown

    def __init__(self, url: str, args: argparse.Namespace):
        import openai
        from lib.openai_client import client_options

        self.client = openai.OpenAI(**client_options(url), timeout=TIMEOUT)
        self.args = args
        self.turns = 0
        self.model = args.model
        if not self.model:
            with self.failures():
                self.model = self.client.models.list().data[0].id

    @contextlib.contextmanager
    def failures(self):
        """Turns what goes wrong with the server into an error message. Raises: RunError"""
        import openai
        from lib.openai_client import error_message, is_context_full

        try:
            yield
        except openai.APIError as error:
            kind = TooLong if is_context_full(error) else RunError
            raise kind(printable(error_message(error))) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RunError("the server sent something that is not the OpenAI chat protocol") from None

    def reply(self, messages: list[dict], answer: dict, show: Callable) -> None:
        """Shows the pieces of the answer to a conversation as they come. Raises: TooLong, RunError"""
        fields = {"model": self.model, "messages": messages, "stream": True}
        fields |= {"temperature": self.args.temperature, "top_p": self.args.top_p}
        if self.args.max_tokens:  # otherwise the server decides, which knows its context
            fields["max_tokens"] = self.args.max_tokens
        if self.args.seed is not None:
            fields["seed"] = self.args.seed + self.turns - 1
        if self.args.top_k is not None:  # not part of the protocol, so only on request
            fields["extra_body"] = {"top_k": self.args.top_k}
        reason = None
        with self.failures(), self.client.chat.completions.create(**fields) as stream:
            for event in stream:
                for choice in event.choices:  # none in an event that counts tokens
                    show(choice.delta.content or "")
                    reason = choice.finish_reason or reason
        if not reason:
            raise RunError("the connection ended before the answer did")


def printable(text: str) -> str:
    """The text without control characters, which could steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


# ==== the conversation


class Chat:
    """History and commands. A message is {"role", "content"}; an answer of a run's model also has "ids".

    Notes go to stderr, so that stdout holds nothing but the answers.
    """

    def __init__(self, backend: Local | Pretrained | Remote, system: str = ""):
        self.backend = backend
        self.system = system
        self.messages = []
        self.unanswered = ""  # the last message, if no answer came
        self.failed = False  # whether any message has no complete answer

    def history(self, messages: list[dict]) -> list[dict]:
        """Messages after the system text, if there is one."""
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def reply(self, answer: dict, show: Callable) -> None:
        """backend.reply() to the conversation, whose oldest turns are dropped if it does not fit."""
        self.backend.turns += 1  # so that a question asked again gets another sample
        for start in range(0, len(self.messages), 2):
            try:
                self.backend.reply(self.history(self.messages[start:]), answer, show)
                break
            except TooLong:
                if start == len(self.messages) - 1:  # the message is too long by itself, and nothing is dropped
                    raise
        if start:
            del self.messages[:start]
            size = f" of {self.backend.limit:,} tokens" if self.backend.limit else ""
            print_note(f"\n(the context{size} is full, oldest turns dropped: {start // 2})")

    def turn(self, text: str) -> None:
        """Prints the answer to a message as it comes. One that is empty is not kept, as data/sft.py refuses it."""
        text = text.encode("utf-8", "replace").decode()  # a terminal may pass bytes that are no text
        answer = {"role": "assistant", "content": ""}
        problem = None

        def show(piece: str) -> None:
            answer["content"] += piece
            print(printable(piece), end="", flush=True)

        self.messages.append({"role": "user", "content": text})
        try:
            self.reply(answer, show)
        except KeyboardInterrupt:
            problem = "(stopped)"
        except RunError as error:
            problem = f"error: {error}"
        print(flush=True)
        self.unanswered = ""
        if problem:
            print_note(problem)
            self.failed = True
        if answer["content"].strip():
            self.messages.append(answer)
        else:
            self.unanswered = self.messages.pop()["content"]

    def command(self, line: str) -> bool:
        """Runs a line that starts with a slash; False ends the chat."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/quit":
            return False
        if name == "/clear":
            self.messages.clear()
            self.unanswered = ""
            print_note("(cleared)")
        elif name == "/undo":
            self.undo()
            print_note("(undone)")
        elif name == "/retry":
            if text := self.unanswered or self.undo():
                self.turn(text)
        elif name == "/temperature":
            self.set_temperature(rest)
        elif name == "/system":
            self.system = rest
            print_note("(set)" if rest else "(no system message)")
        elif name == "/save":
            self.save(rest)
        elif name == "/help":
            print_note(HELP)
        else:
            print_note(f"unknown command {name}; /help lists all")
        return True

    def undo(self) -> str:
        """Forgets the last question and its answer; returns the question, "" if there is none."""
        question = self.messages[-2]["content"] if self.messages else ""
        del self.messages[-2:]
        return question

    def set_temperature(self, text: str) -> None:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if 0 <= value < math.inf:
            self.backend.args.temperature = value
            print_note(f"(temperature {value:g})")
        else:
            print_note("/temperature needs a number that is at least 0")

    def save(self, name: str) -> None:
        """Adds the conversation to a file, as one line of JSON that data/sft.py reads."""
        if not name or not self.messages:
            print_note("/save needs a file name and a conversation to save")
            return
        path = Path(name).expanduser()
        messages = []
        for message in self.messages:
            content = message["content"]
            if "ids" in message:
                content = chat_format.answer_content(self.backend.tokenizer, message["ids"])
            messages.append({"role": message["role"], "content": content})
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.history(messages)}) + "\n")
            print_note(f"(saved {len(self.messages)} messages to {path})")
        except OSError as error:
            print_note(f"cannot write {path} ({error.strerror})")

    def loop(self) -> None:
        """Reads lines until /quit or the end."""
        terminal = sys.stdin.isatty()
        if terminal:
            with contextlib.suppress(ImportError):  # gives input() line editing; Windows has its own
                import readline  # noqa: F401
            print_note("/help lists the commands")
        while True:
            try:
                line = read_lines("> " if terminal else "")
            except EOFError:
                if terminal:
                    print()
                return
            except KeyboardInterrupt:
                if not terminal:
                    raise
                print_note("\n(Ctrl-D or /quit ends the chat)")
                continue
            if line.startswith("/") and not line.startswith("//"):
                if not self.command(line.strip()):
                    return
            elif line.strip():
                self.turn(line.removeprefix("/"))


def read_lines(prompt: str) -> str:
    """A line of the input, and the next ones while a line ends with a backslash."""
    text = input(prompt)
    while text.endswith("\\"):
        text = text[:-1] + "\n"
        with contextlib.suppress(EOFError):
            text += input("... " if prompt else "")
    return text


def talk(args: argparse.Namespace) -> None:
    """Answers --prompt or what is typed. Raises: RunError, SystemExit if an answer is not complete"""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    if args.endpoint is not None:
        backend = Remote(args.endpoint, args)
    elif folder := pretrained_folder(args.run_dir):
        backend = Pretrained(folder, args)
    else:
        backend = Local(args.run_dir, args)
    chat = Chat(backend, args.system)
    if args.prompt is None:
        chat.loop()
    for text in args.prompt or ():
        chat.turn(text)
    is_seen = args.prompt is None and sys.stdin.isatty()  # by whoever sits at the terminal
    if chat.failed and not is_seen:
        sys.exit(1)


def main() -> int:
    return run_command(lambda: talk(parse()))


if __name__ == "__main__":
    sys.exit(main())
