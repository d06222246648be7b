"""The line over HTTP: Open Inference Protocol (v2) for programs,
`POST /classify` for people, metrics, OpenAPI.
"""
