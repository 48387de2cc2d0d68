"""`memserve simulate`: the scheduler as it is, over simulated instances.

    workload.py     what is asked: calls, made of named pieces, and when they arrive
    datasets.py     files of traces and conversations → calls
    synthetic.py    calls from a few numbers
    engine.py       how long a step of an engine takes, and what is in it
    pool.py         an instance's KV blocks: index, eviction, what it tells the prompt trees
    worker.py       one instance: answers the scheduler's commands at simulated times
    simulation.py   the clock, the instances, the clients; runs the real `GlobalScheduler`
    objectives.py   what counts as good
    report.py       figures, tables, CSV
    plots.py        histograms, and the run over time

Prompt trees, policy, lifecycle and scheduler are not modelled: they are the ones that serve.
"""
