#!/bin/sh
# A Slurm cluster of two nodes, `one` and `two`, on this machine and without systemd, for tests. As root, from Debian's
# packages slurm-wlm and munge.
#
#   tests/cluster/slurm.sh start DIR             everything that it writes lies below DIR
#   SLURM_CONF=DIR/slurm.conf sinfo              how commands find it
#   tests/cluster/slurm.sh lose-node DIR one     as a node that loses its power: its daemon and all its jobs die at once
#   tests/cluster/slurm.sh start-node DIR one    it is there again
#   tests/cluster/slurm.sh wait DIR one,two      until these nodes are idle; an error after a minute
#   tests/cluster/slurm.sh stop DIR
#
# Every node has process numbers and a host name of its own (namespaces), so that killing its first process ends it.
set -eu
task=$1
dir=$(realpath -m "$2")
export SLURM_CONF="$dir/slurm.conf"
PATH=$PATH:/usr/sbin

configure() {
    mkdir -p "$dir/state" "$dir/munge"
    head -c 1024 /dev/urandom > "$dir/munge/key"
    chmod 600 "$dir/munge/key"
    cat > "$SLURM_CONF" <<CONF
ClusterName=sinklab-tests
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmdLogFile=$dir/slurmd-%n.log
SlurmdSpoolDir=$dir/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=5
MessageTimeout=3
KillWait=10
NodeName=one NodeHostname=one NodeAddr=127.0.0.1 Port=$(($1 + 1)) CPUs=2
NodeName=two NodeHostname=two NodeAddr=127.0.0.1 Port=$(($1 + 2)) CPUs=2
PartitionName=tests Nodes=ALL Default=YES State=UP
CONF
}

start_node() {
    unshare --uts --pid --fork --mount-proc --kill-child sh -c 'hostname "$0" && exec slurmd -D -N "$0"' "$1" \
        > "$dir/$1.out" 2>&1 < /dev/null &
    echo $! > "$dir/$1.pid"
}

# NAME SIGNAL: to the process whose id stands in DIR/NAME.pid, where there is one
end() {
    if [ -e "$dir/$1.pid" ]; then
        kill "-$2" "$(cat "$dir/$1.pid")" || true
        rm -f "$dir/$1.pid"
    fi
}

case $task in
start)
    configure "${SLURM_PORT:-16817}"
    # --force: also in a folder that only root may enter, who is the only user here
    munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" 2> "$dir/munge/out"
    slurmctld
    start_node one
    start_node two
    ;;
start-node) start_node "$3" ;;
lose-node) end "$3" KILL ;;
wait) timeout 60 sh -c 'until [ "$(sinfo --noheader --format=%t --nodes="$0")" = idle ]; do sleep 0.2; done' "$3" ;;
stop)
    end one KILL
    end two KILL
    end slurmctld TERM
    end munged TERM
    ;;
*) sed -n '2,11p' "$0" && exit 2 ;;
esac
