"""Statistics: the spread of seeds, and how likely a difference is by chance."""

from statistics import fmean, stdev

from scipy import stats

ALPHA = 0.01  # a difference with a smaller p is significant


def sample_sd(values: list[float]) -> float | None:
    """The standard deviation with n - 1; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def welch(new: list[float], old: list[float]) -> dict:
    """mean(new) - mean(old) as "difference", its 95 % interval as "low" and "high", and "p".

    p is that of Welch's two-sided t-test. Interval and p are None where the test is not defined: a
    single run on one side, or no spread on both.
    """
    out = {"difference": fmean(new) - fmean(old), "low": None, "high": None, "p": None}
    if min(len(new), len(old)) > 1 and max(stdev(new), stdev(old)) > 0:
        test = stats.ttest_ind(new, old, equal_var=False)
        interval = test.confidence_interval(0.95)
        out |= {"low": float(interval.low), "high": float(interval.high), "p": float(test.pvalue)}
    return out


def p_below(values: list[float], target: float) -> float | None:
    """One-sided p that the mean is below the target; None for a single run or without spread."""
    if not sample_sd(values):
        return None
    return float(stats.ttest_1samp(values, target, alternative="less").pvalue)
