"""How many steps one call of TensorFlow executes: enough to hide the cost of a call, few enough to pause soon."""

MAX_STEPS = 50  # more would save little more, and with mode=async each unrolled step takes time to trace
CALL_SECS = 0.4  # with mode=async a request to stop or save waits for two calls; longer calls make no run faster
TRIAL_SECS = 0.3  # the shortest time over which steps are measured
TRIAL_STEPS = 3  # the fewest steps of each worker over which they are measured
# Measured with mode=async and models of 2 to 158 trainable variables, on two cores:
SAVED_SECS = 0.003  # the cost of a call, mostly on the coordinator and on the cores that it shares with workers
LEAST_SHARE = 0.25  # of the time of a step that is taken by a call of its own, which the step itself takes at least
IDLE_SECS = 0.03  # if two updates of the cluster are further apart, a call costs less than a tenth of that time
LOOP_SECS = 0.012  # if two updates are further apart, a loop across tasks costs less than a tenth of that time
UNROLLED_SHARE = 0.04  # the time to prepare each further unrolled step, as a share of that for a call of one step


def steps_of_a_call(secs_per_step: float) -> int:
    """The number of steps, from 1 to MAX_STEPS, that take about CALL_SECS."""
    return max(1, min(MAX_STEPS, int(CALL_SECS / secs_per_step)))


def worthwhile_steps(secs_per_step: float, num_workers: int, first_call_secs: float, steps_left: int) -> int:
    """The number of unrolled steps in a call that saves most time in the rest of the run.

    The time that it takes to prepare a call of so many steps is subtracted from what it saves.

    Args:
        secs_per_step: of one worker, in calls of one step.
        num_workers: those that take part in the training.
        first_call_secs: how long the first call of one step took, nearly all of it to prepare the graph.
        steps_left: of the whole cluster, to the end of the run.
    """
    # The coordinator pays for calls at the rate of the whole cluster: many slow workers keep it as busy as a fast one.
    secs_per_update = secs_per_step / num_workers
    if secs_per_update > IDLE_SECS:
        return 1
    # A call cannot cost more than the update that it makes.
    saved_secs = steps_left * min(SAVED_SECS, secs_per_update)

    def net_gain(size: int) -> float:
        ready_secs = first_call_secs * (1 + UNROLLED_SHARE * (size - 1)) if size > 1 else 0.0
        return saved_secs * (1 - 1 / size) - ready_secs

    # The time was measured with calls of one step, so most of it is the cost of those calls if the model is small. The
    # workers wait for one another's, because the coordinator makes one call at a time.
    longest = steps_of_a_call(max(secs_per_step - num_workers * SAVED_SECS, LEAST_SHARE * secs_per_step))
    best = max(range(1, longest + 1), key=net_gain)
    # The estimate is rough: if the longest calls gain nearly as much as the best, take them for their higher rate.
    return longest if net_gain(longest) > 0.8 * net_gain(best) > 0 else best


class CallTimer:
    """Times the first calls of a run, of one step each, to find the size of the later ones.

    Attributes:
        first_call_secs: how long the first step took, with all that it had to prepare; 0 until then.
    """

    def __init__(self) -> None:
        self._begun: tuple[float, tuple[int, ...]] | None = None  # the time, and the steps of each worker then
        self._first: tuple[float, int] | None = None  # the time after the first steps, and the steps of all then
        self.first_call_secs = 0.0

    def secs_per_step(self, now: float, local_steps: tuple[int, ...]) -> float | None:
        """The seconds that one worker takes for a step; None until enough steps were timed.

        Args:
            now: in seconds of any clock.
            local_steps: the steps that each worker has done.
        """
        begun_at, begun = self._begun = self._begun or (now, local_steps)
        steps = sum(local_steps)
        active = sum(after > before for before, after in zip(begun, local_steps, strict=True))
        if self._first is None:  # the first steps are not timed: the first call of a worker prepares its graph
            if active:
                self.first_call_secs = self.first_call_secs or now - begun_at
                # Those that share their cores with others that still prepare are slow. One that is lost never comes.
                if active == len(local_steps) or now - begun_at >= 2 * self.first_call_secs:
                    self._first = now, steps
            return None
        secs, done = now - self._first[0], steps - self._first[1]
        # A worker that is still preparing its graph, or is lost, has no part in the rate.
        if secs < TRIAL_SECS or done < TRIAL_STEPS * active:
            return None
        return secs * active / done
