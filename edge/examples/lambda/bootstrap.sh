#!/bin/sh
# Lambda would start its own runtime with the arguments that it hands to this script; stream.py takes its place.
exec python3 "$LAMBDA_TASK_ROOT/stream.py"
