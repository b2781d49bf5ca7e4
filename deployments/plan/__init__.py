"""The plan states which versions of each model answer requests. Each change increments its number.

An alias is a name for a version. A split gives a version a percentage of the requests. A shadow is
a version that computes requests again for comparison. A pin keeps a model in memory.

The plan is the file `plan.json` of the store, so all processes use the same plan:

    {"number": 7, "models": {"org/name": {"aliases": {"stable": "0123456789ab"}, ...}}}

If the file is missing or has no entry for a model, the configured version of the model answers. If
the configuration names no version, `latest` answers. By default, every build sets `latest` to its
own version. So every sealed model can be served, and a new store needs no plan.

    changes.py      what operators do: promote, roll back, split, shadow, pin. Each function takes
                    the store, changes the plan under a lock and returns the new plan.
    resolution.py   resolves a name, such as `org/name` or `org/name@stable`, to exact versions.
    plan_file.py    reads the file; `PlanWatch.current()` costs under a microsecond and follows
                    changes of the file within a second.

Names are resolved once per request, in the ingress. All messages carry exact versions.
"""
