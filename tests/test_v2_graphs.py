"""Decoding through captured graphs, with stand-ins that replay what was captured.

Real graphs need a GPU. What is held here is everything around them: which graph is taken,
what its spare places point to, and that a replay reads and writes the same buffers.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from runnerctl import LLM, SamplingParams
from runnerctl_runner_v2 import decode_graphs
from runnerctl_runner_v2.decode_graphs import DecodeGraphs, batch_sizes
from tiny_models import make_tiny_model, reference_generate

CPU = torch.device("cpu")


class Graphs:
    """`torch.cuda` as far as capturing goes: a replay runs the captured call again, in place."""

    def __init__(self, forward):
        self.forward, self.capturing, self.replayed = forward, None, []

    def install(self, monkeypatch):
        graphs = self

        class Graph:
            def replay(self):
                graphs.replayed.append(self.idx_mapping.tolist())
                self.logits.copy_(graphs.forward(self.idx_mapping))

        @contextmanager
        def capture(graph, pool):
            self.capturing = graph
            yield
            self.capturing = None

        stream = SimpleNamespace(wait_stream=lambda other: None)
        cuda = SimpleNamespace(
            CUDAGraph=Graph,
            graph=capture,
            graph_pool_handle=lambda: (0, 0),
            Stream=lambda device: stream,
            current_stream=lambda device: stream,
            stream=lambda stream: nullcontext(),
        )
        monkeypatch.setattr(decode_graphs.torch, "cuda", cuda)

    def __call__(self, idx_mapping):
        logits = self.forward(idx_mapping)
        if self.capturing is not None:
            self.capturing.idx_mapping, self.capturing.logits = idx_mapping, logits
        return logits


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 64])
def test_there_is_a_graph_for_every_size_with_little_padding(largest):
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for count in range(1, largest + 1):
        chosen = next(size for size in sizes if size >= count)
        assert chosen - count < 8


def test_a_replay_takes_the_smallest_graph_and_fills_it_with_the_padding_row(monkeypatch):
    graphs = Graphs(lambda rows: rows.unsqueeze(1).float() * torch.tensor([1.0, 10.0]))
    graphs.install(monkeypatch)
    decode = DecodeGraphs(graphs, 8, 99, CPU)
    for rows, padded in (([3], [3]), ([5, 1, 4], [5, 1, 4, 99]), ([2, 7, 0, 6, 1], None)):
        logits, on_device = decode.replay(rows)
        assert on_device.tolist() == rows
        assert logits.tolist() == [[float(row), row * 10.0] for row in rows]
        assert graphs.replayed[-1] == (padded or [*rows, 99, 99, 99])


def test_a_model_decodes_through_graphs_as_it_does_without(tmp_path, monkeypatch):
    folder = make_tiny_model("llama", tmp_path)
    counts = [14, 12, 9, 7, 5, 14]
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
    prompts = [[5, 9, 3], [17], list(range(40, 75)), [8] * 16, [3, 4] * 9, [200, 1]]
    settings = {"dtype": "float32", "max_num_seqs": 5, "block_size": 4}
    with LLM(folder, runner="v2", num_gpu_blocks_override=60, **settings) as llm:
        runner = llm._engine._executor._runner
        graphs = Graphs(runner._capturable_decode)
        graphs.install(monkeypatch)
        make = torch.inference_mode()(lambda: DecodeGraphs(graphs, 5, 5, CPU))
        runner._graphs = runner._lane.call(make)
        outputs = llm.generate(prompts, greedy)
    pairs = zip(prompts, counts, strict=True)
    expected = [reference_generate(folder, prompt, count)[0] for prompt, count in pairs]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert any(5 in rows for rows in graphs.replayed), "no batch was padded"
    assert {len(rows) for rows in graphs.replayed} >= {4, 5}
