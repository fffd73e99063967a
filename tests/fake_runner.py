"""A runner without a model: its paged cache holds the token ids themselves.

Each step writes the scheduled tokens to their slots and reads every request back
through its block table. The next token is a function of what was read, so a block
that was reused too early, a wrong prefix hit or a lost token changes the output.
"""

from collections import deque

from runnerctl.runner.step import StepPlan, StepResult


def next_token(token_ids) -> int:
    """What the fake model says after these tokens."""
    state = 17
    for token in token_ids:
        state = (state * 1_000_003 + token + 1) % 2_147_483_647
    return state % 50_000


def reference(prompt, max_tokens) -> list[int]:
    """What a request alone would generate."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakePagedRunner:
    """Executes plans; `resumes_as_new` says which way resumed requests are to come."""

    def __init__(self, num_blocks: int, block_size: int, *, resumes_as_new: bool) -> None:
        self.block_size = block_size
        self.resumes_as_new = resumes_as_new
        self.slots = [-1] * (num_blocks * block_size)
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        # of the last step, by slot
        self.written: dict[int, int] = {}
        self.read: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        computed = self._take_in(plan)
        self.written, self.read = {}, {}
        for request_id, count in plan.num_scheduled_tokens.items():
            assert count >= 1
            start = computed[request_id]
            for position in range(start, start + count):
                self.written[self._slot(request_id, position)] = self.tokens[request_id][position]
        for slot, token in self.written.items():
            self.slots[slot] = token
        sampled = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            length = computed[request_id] + count
            slots = [self._slot(request_id, position) for position in range(length)]
            read = [self.slots[slot] for slot in slots]
            assert read == self.tokens[request_id][:length], f"{request_id} reads foreign tokens"
            self.read.update(zip(slots, read, strict=True))
            if length == len(self.tokens[request_id]):
                sampled[request_id] = next_token(read)
                self.tokens[request_id].append(sampled[request_id])
        return StepResult(plan.step_id, sampled)

    def _take_in(self, plan: StepPlan) -> dict[str, int]:
        """Bring the state in line with the plan; returns computed tokens before the step."""
        for request_id in plan.finished_request_ids:
            self.tokens.pop(request_id, None)
            self.blocks.pop(request_id, None)
        if self.resumes_as_new:
            for request_id in plan.preempted_request_ids:
                del self.tokens[request_id], self.blocks[request_id]
        computed = {}
        for new in plan.new_requests:
            assert new.request_id not in self.tokens
            self.tokens[new.request_id] = list(new.prefill_token_ids)
            self.blocks[new.request_id] = list(new.block_ids)
            computed[new.request_id] = new.num_computed_tokens
        for cached in plan.cached_requests:
            assert not (cached.resumed and self.resumes_as_new)
            kept = [] if cached.resumed else self.blocks[cached.request_id]
            self.blocks[cached.request_id] = kept + list(cached.new_block_ids)
            computed[cached.request_id] = cached.num_computed_tokens
        assert set(computed) == set(plan.num_scheduled_tokens)
        return computed

    def _slot(self, request_id: str, position: int) -> int:
        block = self.blocks[request_id][position // self.block_size]
        return block * self.block_size + position % self.block_size


class LateFakeRunner(FakePagedRunner):
    """Several steps in flight, each executed at some time between submission and result.

    Steps are executed in order. What a step writes lands once more just before its result
    is taken, and what it read must still be there: so late may a device be with it.

    Args:
        max_num_seqs: how many requests it has room for.
        how_many: called whenever steps could be executed; says how many of them are.
    """

    def __init__(self, *args, max_num_seqs, how_many, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.max_num_seqs = max_num_seqs
        self.how_many = how_many
        self.waiting = deque()
        self.executed = deque()

    def submit(self, plan: StepPlan) -> None:
        self.waiting.append(plan)
        self._run(self.how_many())

    def result(self) -> StepResult:
        """Of the oldest step."""
        self._run(self.how_many())
        if not self.executed:
            self._run(1)
        result, written, read = self.executed.popleft()
        for slot, token in written.items():
            self.slots[slot] = token
        assert {slot: self.slots[slot] for slot in read} == read, "a block was reused too early"
        return result

    def _run(self, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            result = self.execute(self.waiting.popleft())
            if self.resumes_as_new:
                assert len(self.tokens) <= self.max_num_seqs, "there is no row left"
            self.executed.append((result, self.written, self.read))
