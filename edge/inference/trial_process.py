"""Trial process: `python -m edge.inference.trial_process` loads models that nobody has run here
before, and lets them compute.
"""

from edge.inference.model_trial import answer_trial
from edge.inference.worker_process import serve_requests

if __name__ == "__main__":
    serve_requests(answer_trial)
