"""`memserve simulate`: the scheduler as it is, over simulated instances.

    command.py      options, and what is printed
    setup.py        from options to a load, a cluster and its costs; every mistake is named
    workload.py     what is asked: calls, made of named pieces, and when they arrive
    datasets.py     files of traces and conversations → calls
    synthetic.py    calls from a few numbers
    clock.py        what happens next, in simulated time
    engine.py       how long a step of an engine takes, what is in it, which blocks it needs
    link.py         how long KV is on its way
    worker.py       one instance: answers the scheduler's commands at simulated times
    simulation.py   the instances and the clients; runs the real `GlobalScheduler`
    objectives.py   what counts as good
    report.py       figures, tables, CSV
    plots.py        histograms, and the run over time

Prompt trees, policy, lifecycle and scheduler are not modelled: they are the ones that serve. So are
the pool, the index and the transfers of each instance.
"""
