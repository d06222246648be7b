"""The commands of `edge-node`, by who types them. Imports are inside them: `--help` is fast."""
