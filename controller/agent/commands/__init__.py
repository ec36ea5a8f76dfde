"""Commands that change or observe a worker, a module each; `agent/dispatch.py` names them.

Programs that outlive a command are kept by `agent/supervisor.py`. Imports the agent and the standard library; JAX in
`chip_check`, which the run's own Python executes.
"""
