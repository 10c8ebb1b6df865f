r"""A pytest plugin that runs PyTorch's own checkpoint tests against recollect.

PYTHONPATH=src:tests/conformance python -m pytest -p plugin \
        <pytorch>/test/test_utils.py -k Checkpoint
"""

import recollect

recollect.install()
