# Starts the engine of a node, also after the node was killed.
set -eu

# Pid files of an engine that was killed would name processes of this one.
rm -f /run/docker.pid /run/docker/containerd/containerd.pid

# With cgroup v2 only leaves may hold processes: make one for ours, so that the engine can have groups beside it.
groups=/sys/fs/cgroup
if [ -e $groups/cgroup.controllers ]; then
    mkdir -p $groups/engine
    while read -r process; do echo "$process" > $groups/engine/cgroup.procs; done < $groups/cgroup.procs
    for controller in $(cat $groups/cgroup.controllers); do echo "+$controller" > $groups/cgroup.subtree_control; done
fi

exec dockerd
