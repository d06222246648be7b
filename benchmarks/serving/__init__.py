"""Cost of serving over a bare onnxruntime call, here and in two common ways:
`python -m benchmarks.serving`.
"""
