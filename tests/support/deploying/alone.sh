#!/bin/sh
# Runs a command where a container engine can be started beside nothing else: alone.sh COMMAND [ARGUMENT ...].
# It has network, process and mount namespaces of its own, which end with it, and with them all that it started; the
# folder $DEPLOY_SCRATCH, and the control groups below $DEPLOY_GROUP, are removed afterwards.
set -u
DEPLOY_SCRATCH=$(mktemp -d /tmp/heliograph-deploy-XXXXXX)
DEPLOY_GROUP=/$(basename "$DEPLOY_SCRATCH")
export DEPLOY_SCRATCH DEPLOY_GROUP
tidy() {
  find /sys/fs/cgroup -depth -type d -path "*$DEPLOY_GROUP*" -exec rmdir {} + 2> /dev/null
  rm -rf "$DEPLOY_SCRATCH"
}
trap tidy EXIT
trap 'exit 130' INT TERM
unshare --net --pid --mount --fork --kill-child --mount-proc \
  sh -c 'ip link set lo up && "$@"; exit $?' sh "$@"
