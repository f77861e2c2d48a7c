"""Measures a daemon through its public door, and what it leaves behind.

Where to begin: `cli` has the arguments, `commands` makes options of them, and each shape is a module with a
`run` that returns a `Result`. Those that put a load on a daemon (`burst`, `arrivals`, `churn`, and `sweep`,
which is many bursts) write a `Plan`, and `load` has client processes carry it out, each a `client_process`.
`session` has the daemon, the bench's own or a running one.

    shapes     burst sweep arrivals churn │ command soak bombs fork starts chaos, in the bench's own process
    measuring  plan load client_process client_limit phases readings health audit
    results    result schema slo │ report comparing │ page charts style
"""
