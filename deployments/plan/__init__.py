"""Which version of a model answers: aliases, splits, shadows and pins, as one value with a number.

The plan is the file `plan.json` of the store, so it survives every process and all of them agree:

    {"number": 7, "models": {"org/name": {"aliases": {"stable": "0123456789ab"}, ...}}}

Without the file, or without an entry of a model, the model's version is `latest`, which every build
moves. So every sealed model of a store can be served, and a new store needs no plan.

    changes.py      what operators do: promote, roll back, split, shadow, pin. Each function takes
                    the store, changes the plan under a lock and returns the new one.
    resolution.py   from a name, such as `org/name` or `org/name@stable`, to exact versions.
    plan_file.py    reads the file; `PlanWatch.current()` costs under a microsecond and follows
                    changes of the file within a second.

Names are resolved once per request, in the ingress. All messages carry exact versions.
"""
