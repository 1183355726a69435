"""The learning-rate schedule, a pure function of the step."""

from depthroute.optim.config import ScheduleConfig


def schedule_factor(step: int, num_steps: int, config: ScheduleConfig) -> float:
    """Return the factor of every learning rate at a step.

    Warm-up `(step + 1) / warmup_steps`, then 1, then linearly down over the last
    `int(warmdown_fraction * num_steps)` steps, the last of which has the floor.

    Args:
        step: From 0.
        num_steps: Of the whole run.
        config: The schedule.
    """
    up = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    warmdown = int(config.warmdown_fraction * num_steps)
    done = (step + 1 - (num_steps - warmdown)) / max(warmdown, 1)
    return min(up, 1.0 + (config.floor - 1.0) * max(done, 0.0))
