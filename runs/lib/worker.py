"""The thread of the server that owns the model: it decodes the requests of the event loop."""

import asyncio
import contextlib
import threading
import time
import traceback
from functools import partial

import engine
import prometheus_client as prometheus
import torch
from lib.protocol import APIError, Request, Sequence

# Prompt tokens that join in one step, so that a prefill does not hold the running answers up for long.
MAX_NUM_BATCHED_TOKENS = 16384
PREFILL_DELAY_STEPS = 2  # that a few new sequences wait for others, as each prefill holds all slots up
STOPPING = "the server is stopping"
FAILED = "the model has stopped and the server's log says why; restart the server"


class Metrics:
    """What /metrics shows. The names are vLLM's, where it has them; its requests are our sequences."""

    def __init__(self, worker: "Worker"):
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)  # process_cpu_seconds_total and others
        own = {"namespace": "decoderstack", "registry": self.registry}
        counter = partial(prometheus.Counter, **own)
        self.requests = counter("http_requests", "Requests by path and status", ("path", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens that were cached by earlier requests")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.steps = counter("steps", "Model steps")
        self.preemptions = counter("num_preemptions", "Answers that lost their slot to another request")
        self.aborted = counter("num_requests_aborted", "Requests whose client disconnected")
        text = "Seconds from the arrival of a request to the first token of each of its answers"
        self.time_to_first_token = prometheus.Histogram("time_to_first_token_seconds", text, **own)
        gauge = partial(prometheus.Gauge, **own)
        gauge("max_num_seqs", "Answers that can decode together").set_function(lambda: worker.decoder.num_slots)
        gauge("num_requests_running", "Answers that have a slot").set_function(lambda: len(worker.sequences))
        gauge("num_requests_waiting", "Answers that wait for a slot").set_function(worker.num_waiting)


def stream_interval(num_running: int) -> float:
    """Seconds between two messages to a client.

    With few answers each token goes out with its step. With many, those of several steps go together, as a message
    costs more time than a token.
    """
    return max(0, num_running - 8) * 0.4e-3


class Worker(threading.Thread):
    """Decodes all sequences in the slots of one Decoder. The event loop calls submit, abort and stop."""

    def __init__(self, model, tokenizer, max_num_seqs: int, max_queue_size: int, compile: bool = False):
        super().__init__(name="worker", daemon=True)
        self.model = model
        self.max_queue_size = max_queue_size
        prefix_slots = max(2, max_num_seqs // 4)
        self.decoder = engine.Decoder(model, tokenizer, max_num_seqs, compile=compile, prefix_slots=prefix_slots)
        self.queue: dict[Request, None] = {}  # requests with sequences that wait, in order of arrival
        self.sequences: dict[int, Sequence] = {}  # by slot
        self.idle_slots = list(range(max_num_seqs))  # least recently used first
        self.steps_delayed = 0  # steps in a row that new sequences have waited for others
        self.updated: set[Request] = set()  # requests that the event loop has not been notified of
        self.last_flush = 0.0  # when it was last notified of all
        self.failures = 0  # in a row
        self.draining = False  # no new requests, as it stops or has failed
        self.closed = False  # the loop of run() ends
        self.wake = threading.Condition()
        self.warm = threading.Event()
        self.error: Exception | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.metrics = Metrics(self)

    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return sum(len(request.waiting) for request in list(self.queue))

    def submit(self, request: Request) -> None:
        """Queues the sequences of one request, all or none. Raises: APIError"""
        self.loop = asyncio.get_running_loop()
        with self.wake:
            if self.draining:
                raise APIError(503, FAILED if self.error else STOPPING)
            count = self.num_waiting() + len(self.sequences)
            capacity = self.decoder.num_slots + self.max_queue_size
            if count + len(request.sequences) > capacity:
                busy = f"{count} answers are running or waiting, the most allowed is {capacity}; try again in a moment"
                raise APIError(429, busy, code="queue_full")
            self.queue[request] = None
            self.wake.notify()

    def abort(self, request: Request) -> None:
        """Ends a request, if it has not ended yet; its slots are free before the next step."""
        if not request.aborted and not request.done() and not request.error:
            self.metrics.aborted.inc()
        request.aborted = True
        with self.wake:
            request.waiting.clear()
            self.queue.pop(request, None)

    def stop(self) -> None:
        """Ends running answers with an error."""
        with self.wake:
            self.draining = True
            self.closed = True
            self.wake.notify()

    def run(self) -> None:
        try:
            self.warm_up()
            self.warm.set()
            while not self.closed:
                with self.wake:
                    self.wake.wait_for(lambda: self.queue or self.sequences or self.closed)
                self.step()
        except Exception as error:
            self.error = error
            if self.warm.is_set():  # else Server() reports it
                traceback.print_exc()
        self.warm.set()
        with self.wake:
            self.draining = True
            requests = {sequence.request for sequence in self.sequences.values()} | set(self.queue)
            self.queue = {}
        self.notify(self.updated)
        self.notify(requests, APIError(503, FAILED if self.error else STOPPING))

    def warm_up(self) -> None:
        """Builds the usual graphs before anyone waits for them, and takes memory for a prefill."""
        if self.model.embed.is_cuda:
            torch.cuda.set_device(self.model.embed.device)  # of this thread
        sizes = [128]
        if self.decoder.prefill_graphs is not None:
            sizes += engine.NEW_BUCKETS
        for size in sizes:
            prompt = [0] * min(size, self.decoder.max_len)
            for temperature in (0.0, engine.Completion.temperature):
                self.decoder.add_requests({0: engine.Completion(prompt, 1, temperature)})
                self.decoder.step()
                self.decoder.evict(0)

    def step(self) -> None:
        """Releases finished sequences, fills idle slots with waiting ones, and makes one step."""
        self.release_finished()
        with self.wake:
            self.preempt()
            new = self.admit()
        try:
            if new:
                self.add_sequences(new)
        except Exception:
            self.fail(list(new))
        try:
            self.decode_step()
        except Exception:
            self.fail(list(self.sequences))

    def fail(self, slots: list[int]) -> None:
        """Logs the exception of the model, and ends what is in these slots with an error; the server continues."""
        traceback.print_exc()
        self.failures += 1
        requests = {self.sequences[slot].request for slot in slots}
        for slot in slots:
            with contextlib.suppress(Exception):  # the device may no longer work
                self.decoder.evict(slot)
            self.release(slot)
        self.notify(requests, APIError(500, "the model failed; the server's log says how"))

    # -- slots

    def release_finished(self) -> None:
        """Frees the slots of sequences whose client disconnected, or that a stop string ended."""
        for slot, sequence in list(self.sequences.items()):
            if sequence.request.aborted or sequence.reason:
                self.release(slot)

    def preempt(self) -> None:
        """Makes a slot idle for each request that has none, as long as another request has two or more.

        The request with the most slots gives up that of its shortest answer, which keeps its tokens and continues
        later.
        """
        waiting = [request for request in self.queue if not request.num_running]
        for _ in range(len(waiting) - len(self.idle_slots)):
            running = [sequence.request for sequence in self.sequences.values()]
            largest = max(running, key=lambda request: request.num_running, default=None)
            if largest is None or largest.num_running < 2:
                return
            slots = [slot for slot, sequence in self.sequences.items() if sequence.request is largest]
            slot = min(slots, key=lambda slot: len(self.sequences[slot].completion.tokens))
            largest.waiting.appendleft(self.release(slot))
            self.queue[largest] = None
            self.metrics.preemptions.inc()

    def admit(self) -> dict[int, Sequence]:
        """Chooses slots for waiting sequences.

        The request with the fewest slots is next, and of these the one that came first. A sequence gets the idle slot
        that holds most of it, and of equal ones the least recently used.
        """
        new = {}
        if not self.idle_slots or not self.queue or self.delay_prefill():
            return new
        num_tokens = 0  # to compute
        while self.idle_slots and self.queue and num_tokens < MAX_NUM_BATCHED_TOKENS:
            request = min(self.queue, key=lambda request: request.num_running)
            sequence = request.waiting.popleft()
            if not request.waiting:
                del self.queue[request]
            ids = sequence.completion.prefill_tokens()
            num_cached = {slot: self.decoder.prefix_cache.match(slot, ids) for slot in self.idle_slots}
            slot = max(num_cached, key=num_cached.get)  # the first of equal ones
            num_tokens += len(ids) + 1 - num_cached[slot]
            self.idle_slots.remove(slot)
            request.num_running += 1
            new[slot] = sequence
        self.sequences |= new  # under the lock, so that submit() counts each once
        return new

    def delay_prefill(self) -> bool:
        """Whether a few new sequences should wait for others, so that one prefill serves all."""
        few = self.num_waiting() < self.decoder.num_slots // 8
        delay = bool(self.sequences) and few and self.steps_delayed < PREFILL_DELAY_STEPS
        self.steps_delayed = self.steps_delayed + 1 if delay else 0
        return delay

    def release(self, slot: int) -> Sequence:
        """Makes a slot idle, whether its answer has ended or not; what it holds stays in the prefix cache."""
        if slot in self.decoder.running:
            self.decoder.release([slot])
        sequence = self.sequences.pop(slot)
        sequence.request.num_running -= 1
        self.idle_slots.append(slot)
        return sequence

    # -- work of the model

    def add_sequences(self, new: dict[int, Sequence]) -> None:
        """Prefills sequences in their slots."""
        num_cached = self.decoder.add_requests({slot: sequence.completion for slot, sequence in new.items()})
        for slot, sequence in new.items():
            if sequence.num_cached is None:  # else it was preempted
                sequence.num_cached = num_cached[slot]
                self.metrics.prompt_tokens.inc(len(sequence.completion.prompt))
                self.metrics.prefix_cache_hits.inc(num_cached[slot])

    def decode_step(self) -> None:
        """Makes one step of the decoder, and passes its tokens on."""
        outputs = self.decoder.step()
        if outputs:
            self.failures = 0
            self.metrics.steps.inc()
            self.metrics.generation_tokens.inc(sum(output.token is not None for output in outputs))
        self.deliver(outputs)

    def deliver(self, outputs: list[engine.StepOutput]) -> None:
        """Gives the outputs of a step to their sequences, and notifies the event loop.

        The first and the last token of an answer go out at once, the others at each stream_interval. A client that does
        not stream only gets the end.
        """
        urgent = set()
        for output in outputs:
            sequence = self.sequences[output.slot]
            request = sequence.request
            sequence.add_output(output)
            is_first = output.token is not None and len(sequence.completion.tokens) == 1
            if is_first:
                self.metrics.time_to_first_token.observe(time.monotonic() - request.arrival)
            if output.reason:
                self.release(output.slot)
            if request.fields.stream or request.done():
                self.updated.add(request)
                if is_first or sequence.reason:
                    urgent.add(request)

        now = time.monotonic()
        if now - self.last_flush >= stream_interval(len(self.sequences)):
            self.last_flush = now
            urgent = self.updated
        self.notify(urgent)
        self.updated = self.updated - urgent

    def notify(self, requests: set[Request], error: APIError | None = None) -> None:
        """Wakes the event loop's tasks of requests, perhaps with an error for the client."""
        for request in requests:
            request.error = request.error or error
        if requests:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(lambda: [request.updated.set() for request in requests])
