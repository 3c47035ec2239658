"""How many steps one call of TensorFlow takes: enough to hide what a call costs, few enough to pause soon."""

MAX_STEPS = 50  # more would hide little, and in mode async they are unrolled, which takes its time
CALL_SECS = 0.4  # a wish to stop or save waits for two calls in mode async; longer ones make no run faster
TRIAL_SECS = 0.3
TRIAL_STEPS = 3  # of each worker


def steps_of_a_call(secs_per_step: float) -> int:
    return max(1, min(MAX_STEPS, int(CALL_SECS / secs_per_step)))


class Trial:
    """Times the first calls of a run, of one step each, to find the size of the later ones."""

    def __init__(self) -> None:
        self._begun: tuple[int, ...] | None = None  # steps of each worker
        self._first: tuple[float, int] | None = None  # when a step had been done, and the steps then

    def size(self, now: float, local_steps: tuple[int, ...]) -> int | None:
        """The steps of a call, as soon as that is clear.

        Args:
            now: in seconds of any clock.
            local_steps: what each worker has done.
        """
        self._begun = self._begun or local_steps
        steps = sum(local_steps)
        if self._first is None:  # the first call of a worker prepares its graph
            if steps > sum(self._begun):
                self._first = (now, steps)
            return None
        secs, done = now - self._first[0], steps - self._first[1]
        active = sum(after > before for before, after in zip(self._begun, local_steps, strict=True))
        if secs < TRIAL_SECS or done < TRIAL_STEPS * active:
            return None
        return steps_of_a_call(secs * active / done)
