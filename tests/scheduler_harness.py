"""What the tests of the scheduler share, however many steps are in flight."""

from runnerctl.config.engine_config import CacheSection, SchedulerSection
from runnerctl.engine.block_pool import BlockPool
from runnerctl.engine.request import Request, RequestStatus
from runnerctl.engine.sampling_params import SamplingParams
from runnerctl.engine.scheduler import Scheduler


class SchedulerHarness:
    """A scheduler, and what was asked of it; subclasses run its plans."""

    def __init__(
        self,
        *,
        num_blocks=100,
        block_size=4,
        budget=64,
        max_num_seqs=16,
        prefix_caching=True,
        resumes_as_new=False,
    ):
        self.pool = BlockPool(num_blocks)
        self.budget = budget
        self.capacity = num_blocks * block_size
        self.scheduler = Scheduler(
            SchedulerSection(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
            CacheSection(block_size=block_size, enable_prefix_caching=prefix_caching),
            self.pool,
            resumes_as_new=resumes_as_new,
        )
        self.runner = self.make_runner(
            num_blocks, block_size, resumes_as_new=resumes_as_new, max_num_seqs=max_num_seqs
        )
        self.plans = []
        self.arrivals = []

    def make_runner(self, num_blocks, block_size, *, resumes_as_new, max_num_seqs):
        raise NotImplementedError

    def add(self, prompt, max_tokens, request_id=None, **params):
        request = Request(
            request_id or f"r{len(self.arrivals)}",
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, **params),
            max_total_tokens=self.capacity,
        )
        self.scheduler.add(request)
        self.arrivals.append(request)
        return request

    def planned(self, plan):
        """Take a plan into the books; holds what is true of every plan."""
        assert plan.step_id == len(self.plans)
        assert plan.total_num_scheduled_tokens <= self.budget
        # who lost its blocks does not get them back at once, nor does anybody new
        assert not plan.preempted_request_ids & plan.num_scheduled_tokens.keys()
        assert not (plan.preempted_request_ids and plan.new_requests)
        live = [r for r in self.arrivals if r.status is not RequestStatus.FINISHED]
        assert [
            *self.scheduler.running,
            *self.scheduler.waiting,
        ] == live  # first come, first served
        self.plans.append(plan)
