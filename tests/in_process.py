"""What the tests of the benchmarks of attention share."""


class InProcess:
    """Stands in for the worker: the same calls, in this process, where methods can be replaced."""

    def __init__(self, make, *args):
        self.call = make(*args)

    def __call__(self, *task, limit):
        return self.call(*task)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass
