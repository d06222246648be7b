"""Decoder process: `python -m edge.inference.decoder_process` decodes the images whose decoding
can take long.
"""

from edge.inference.image_decoding import answer_decoding
from edge.inference.worker_process import serve_requests

if __name__ == "__main__":
    serve_requests(answer_decoding)
