"""What the C++ backend's own client does, step by step, by a client of that shape."""

import functools
import queue
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from running_server import wait_for
from tritonclient.utils import InferenceServerException

TOKENS = [9, 30, 71, 5, 12]
LONG = 480
TIMEOUT_S = 30


def tensor(name, array):
    """Shapes have the batch first; the datatype is that of the array, as the client takes it."""
    names = {"int32": "INT32", "float32": "FP32", "bool": "BOOL", "uint64": "UINT64"}
    found = grpcclient.InferInput(name, array.shape, names[str(array.dtype)])
    found.set_data_from_numpy(array)
    return found


@dataclass
class Program:
    """One run; its fields are the options of the command line."""

    client: grpcclient.InferenceServerClient
    wait_until_it_runs: Callable[[], None]  # a person counts milliseconds instead
    tokens: list = field(default_factory=lambda: TOKENS)
    output_len: int = 16
    streaming: bool = False
    beam_width: int = 1
    requested_outputs: tuple = ()
    stop_after_tokens: int = 0
    cancels_after_tokens: int = 0
    expected: list | None = None
    request_id: str = "1"
    is_stopped: bool = False
    optional: dict = field(default_factory=dict)

    def inputs(self):
        always = {
            "input_ids": np.array([self.tokens], dtype=np.int32),
            "input_lengths": np.array([[len(self.tokens)]], dtype=np.int32),
            "request_output_len": np.array([[self.output_len]], dtype=np.int32),
            "beam_width": np.array([[self.beam_width]], dtype=np.int32),
            "temperature": np.array([[1.0]], dtype=np.float32),
            "streaming": np.array([[self.streaming]]),
            "end_id": np.array([[-1]], dtype=np.int32),
            "pad_id": np.array([[1]], dtype=np.int32),
            "return_log_probs": np.array([["output_log_probs" in self.requested_outputs]]),
            "runtime_top_k": np.array([[1]], dtype=np.int32),
            "runtime_top_p": np.array([[0.0]], dtype=np.float32),
        }
        return [tensor(name, array) for name, array in {**always, **self.optional}.items()]

    def stop_inputs(self):
        return [
            tensor("input_ids", np.zeros((1, 1), dtype=np.int32)),
            tensor("input_lengths", np.zeros((1, 1), dtype=np.int32)),
            tensor("request_output_len", np.zeros((1, 1), dtype=np.int32)),
            tensor("stop", np.array([[True]])),
        ]

    def run(self):
        """The tokens of each beam, and how many answers to a stop came."""
        beams, num_stopped = [[] for _ in range(self.beam_width)], 0
        came = queue.Queue()

        def take(result, error):
            came.put(error if error is not None else result)

        outputs = [grpcclient.InferRequestedOutput(name) for name in self.requested_outputs]
        options = {"request_id": self.request_id, "outputs": outputs or None}
        if not self.streaming:
            call = self.client.async_infer("tensorrt_llm", self.inputs(), take, **options)
            if self.stop_after_tokens:
                self.wait_until_it_runs()
                self.client.async_infer(
                    "tensorrt_llm", self.stop_inputs(), take, request_id=self.request_id
                )
            if self.cancels_after_tokens:
                self.wait_until_it_runs()
                call.cancel()
            expected = 2 if self.stop_after_tokens else 1
            for _ in range(expected):
                num_stopped += self._read(came.get(timeout=TIMEOUT_S), beams)
            return self._checked(beams), num_stopped
        self.client.start_stream(take)
        self.client.async_stream_infer(
            "tensorrt_llm", self.inputs(), enable_empty_final_response=True, **options
        )
        num_final = 0
        while num_final < (2 if self.stop_after_tokens else 1):
            result = came.get(timeout=TIMEOUT_S)
            num_stopped += self._read(result, beams)
            final = result.get_response().parameters["triton_final_response"]
            num_final += final.bool_param
            if len(beams[0]) == self.stop_after_tokens and not self.is_stopped:
                self.is_stopped = True
                self.client.async_stream_infer(
                    "tensorrt_llm", self.stop_inputs(), request_id=self.request_id
                )
            if self.cancels_after_tokens and len(beams[0]) == self.cancels_after_tokens:
                self.client.stop_stream(cancel_requests=True)
        self.client.stop_stream()
        return self._checked(beams), num_stopped

    def _read(self, result, beams):
        """Adds what a response has; 1 for the answer to a stop."""
        if isinstance(result, Exception):
            raise result
        names = [output.name for output in result.get_response().outputs]
        assert result.get_response().id == self.request_id
        if not names:
            return 1
        if self.requested_outputs:
            assert sorted(names) == sorted(self.requested_outputs)
        ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        if self.streaming:
            if lengths[0][0]:
                beams[0] += ids[0][0][: lengths[0][0]].tolist()
            return 0
        for beam, found in enumerate(beams):
            found += ids[0][beam][: lengths[0][beam]].tolist()
        return 0

    def _checked(self, beams):
        if self.expected is not None:
            assert beams == self.expected
        return beams


@pytest.fixture
def program(front, server):
    with grpcclient.InferenceServerClient(f"127.0.0.1:{front.port}") as client:
        runs = functools.partial(wait_for, lambda: server.engine.counts.running)
        yield functools.partial(Program, client, runs)


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    server.wait_idle()
    assert server.engine.manager.audit().ok


@pytest.mark.parametrize("streaming", [False, True])
def test_output_is_as_expected(program, expected, streaming):
    result = expected(TOKENS, 16)
    wanted = result.generated_ids if streaming else result.output_ids
    program(streaming=streaming, expected=[list(wanted[0])]).run()
    names = ("sequence_length", "output_ids", "output_log_probs", "cum_log_probs")
    program(streaming=streaming, requested_outputs=names, expected=[list(wanted[0])]).run()


def test_beams(program, expected):
    wanted = [list(one) for one in expected(TOKENS, 16, beam_width=3).output_ids]
    program(beam_width=3, expected=wanted).run()


def test_optional_tensors_are_passed_on(program, expected):
    optional = {
        "random_seed": np.array([[7]], dtype=np.uint64),
        "repetition_penalty": np.array([[1.3]], dtype=np.float32),
        "stop_words_list": np.array([[[1], [1]]], dtype=np.int32),
        "bad_words_list": np.array([[[2], [1]]], dtype=np.int32),
        "draft_input_ids": np.array([[4, 5]], dtype=np.int32),
        "early_stopping": np.array([[False]]),
    }
    (beam,), _ = program(optional=optional).run()
    wanted = expected(TOKENS, 16, repetition_penalty=1.3).output_ids[0]
    assert beam == list(wanted)


def test_stopped_after_a_while(program, expected, server):
    with server.held():
        (beam,), num_stopped = program(streaming=True, output_len=LONG, stop_after_tokens=3).run()
    assert num_stopped == 1 and 3 <= len(beam) < LONG
    assert beam == list(expected(TOKENS, LONG).generated_ids[0][: len(beam)])
    with server.held():
        (beam,), num_stopped = program(output_len=LONG, stop_after_tokens=1).run()
    assert num_stopped == 1 and len(beam) < LONG + len(TOKENS)


@pytest.mark.parametrize("streaming", [False, True])
def test_stopped_by_cancellation(program, streaming, server):
    run = program(output_len=LONG, streaming=streaming, cancels_after_tokens=2)
    with server.held(), pytest.raises(InferenceServerException) as error:
        run.run()
    assert "CANCELLED" in error.value.status()
