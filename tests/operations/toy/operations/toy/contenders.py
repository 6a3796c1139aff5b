"""Two implementations each of doubling and of negating a number."""

from flashmoe_tools.bench.contenders import Contender, Prepared, always


def contenders() -> tuple[Contender, ...]:
    return (
        Contender("ours", "ours", ("cpu",), always, lambda inputs: Prepared(lambda: -inputs.x - inputs.x), ours=True),
        Contender("theirs", "theirs", ("cpu",), always, lambda inputs: Prepared(lambda: inputs.x * -2)),
    )
