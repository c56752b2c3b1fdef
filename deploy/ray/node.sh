#!/bin/sh
# Makes this machine a node of a Ray cluster, in the foreground, for a service manager to supervise:
#
#     node.sh head                  on the first machine
#     node.sh join HEAD[:6379]      on the others
#
# NODE_ADDRESS: this machine's address for the others (default: Ray's guess). RAY_BIN: the folder of the command `ray`,
# in the environment with heliograph[ray]. The members of a pool inherit this environment: HELIOGRAPH_CACHE,
# CUDA_VISIBLE_DEVICES, and so on.
#
# Any host that reaches Ray's ports can run code here: see README.md.
set -eu

ray="${RAY_BIN:-}${RAY_BIN:+/}ray"
address="${NODE_ADDRESS:+--node-ip-address=$NODE_ADDRESS}"

case "${1:-}" in
head)
  # shellcheck disable=SC2086 # nothing or one word
  exec "$ray" start --head --port=6379 --ray-client-server-port=10001 $address \
    --include-dashboard=false --disable-usage-stats --block ${RAY_OPTIONS:-}
  ;;
join)
  case "${2:?the address of the head is missing}" in
  *:*) head="$2" ;;
  *) head="$2:6379" ;;
  esac
  # shellcheck disable=SC2086
  exec "$ray" start --address="$head" $address --disable-usage-stats --block ${RAY_OPTIONS:-}
  ;;
*)
  echo "usage: node.sh head | node.sh join HEAD[:PORT]" >&2
  exit 2
  ;;
esac
