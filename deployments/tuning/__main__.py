"""`python -m deployments.tuning`: see process.py."""

import sys

from deployments.tuning.process import main

if __name__ == "__main__":
    sys.exit(main())
