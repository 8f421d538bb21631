#!/usr/bin/env bash
# devcluster.sh - a real multi-node Slurm cluster on one Linux machine, for tests.
#
#   devcluster.sh install         with apt-get, what of Slurm is missing on this machine
#   devcluster.sh can             whether this machine can run it; if not, one line says why
#   devcluster.sh start [N]       bring up N nodes, node0 .. node(N-1); 5 if not said
#   devcluster.sh stop            end every process it started, undo the network
#   devcluster.sh status          what runs, then sinfo; fails unless all of it is up
#   devcluster.sh env             print the line that points Slurm's commands at it
#   devcluster.sh login CMD ...   run CMD as on a login node: that line, node names known
#   devcluster.sh enter NODE CMD ...   run CMD on a node, past Slurm
#   devcluster.sh crash NODE      cut the node's network, then kill all that runs on it
#   devcluster.sh boot NODE       power it on again, with nothing running
#                                 (with slurmctld as NODE, they stop and start the controller)
#
# Each node is a slurmd in PID, network, UTS and mount namespaces of its own, with its
# own host name and address: a launcher that says 127.0.0.1, or counts on a port that
# only one node has free, fails here as it would on a cluster. The file system is shared,
# /tmp and /dev/shm too; disk/ in its folder is one of 100 MB, for tests to fill.
# Processors, memory and GPUs are declared, not real: nothing is confined to them.
#
# Runs as root, on: apt-get install slurm-wlm munge iproute2 util-linux
# With DEVCLUSTER_ACCT=1, which sacct needs, also on: slurmdbd mariadb-server
# Several can run beside each other, each with a DEVCLUSTER_ID of its own.
# With DEVCLUSTER_OWNER=PID, `start` begins afresh and the cluster ends with that process.
set -euo pipefail

ID=${DEVCLUSTER_ID:-0}                   # 0 to 99
DIR=${DEVCLUSTER_DIR:-/tmp/devcluster$ID}   # all state; slurm.conf allows no spaces in it
NET=10.213.$((57 + ID))                  # the controller is $NET.1, node I is $NET.(10+I)
CPUS=${DEVCLUSTER_CPUS:-128}             # of each node
MEM=${DEVCLUSTER_MEM:-1000000}           # of each node, in MB
GPUS=${DEVCLUSTER_GPUS:-8}               # of each node; stand-ins that act as /dev/null
ACCT=${DEVCLUSTER_ACCT:-0}               # 1: slurmdbd on mariadb, so that sacct works
OWNER=${DEVCLUSTER_OWNER:-}
DB=/dev/shm/devcluster$ID-db             # in memory, since on disk it starts 7 s later
BRIDGE=devcluster$ID
PORT=$((26800 + 10 * ID))                # of slurmctld; slurmd and slurmdbd have the next two
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$DIR/slurm.conf

die() { echo "devcluster: $*" >&2; exit 1; }

# --- Processes. run/NAME.pid holds "PID STARTTIME", so that no recycled pid is ever hit.

starttime() { # PID; nothing for a zombie, which a container's PID 1 may never reap
  sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 !~ /[ZX]/ {print $20}'
}

alive() { # NAME; prints its pid
  local pid start
  read -r pid start 2>/dev/null <"$DIR/run/$1.pid" || return 1
  [[ -n $start && $(starttime "$pid") == "$start" ]] && echo "$pid"
}

spawn() { # NAME CMD ...
  local name=$1; shift
  setsid "$@" </dev/null >>"$DIR/log/$name.out" 2>&1 9>&- &
  echo "$! $(starttime $!)" >"$DIR/run/$name.pid"
}

finish() { # NAME [SIGNAL]
  local pid i
  if pid=$(alive "$1"); then
    kill "-${2:-TERM}" "$pid" 2>/dev/null || true
    for ((i = 0; i < 400; i++)); do alive "$1" >/dev/null || break; sleep 0.05; done
    if alive "$1" >/dev/null; then kill -KILL "$pid" 2>/dev/null || true; fi
  fi
  rm -f "$DIR/run/$1.pid"
}

waitfor() { # SECONDS NAME CMD ...
  local deadline=$((SECONDS + $1)) name=$2; shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < deadline)) || die "$name did not come up; see $DIR/log/$name.out"
    sleep 0.05
  done
}

# --- Configuration

write_config() { # N
  local last=$(($1 - 1)) here i
  here=$(hostname -s)
  {
    cat <<CONF
ClusterName=devcluster
SlurmctldHost=$here($NET.1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits for cred_expire before it may start again: 120 s if not said
AuthInfo=socket=$DIR/run/munge.socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.own.pid
SlurmdPidFile=$DIR/run/slurmd.%n.own.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
# no cgroups and no binding, for most of the processors declared below do not exist
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$((MEM / CPUS))
GresTypes=gpu
EnforcePartLimits=ALL
# ids do not come back after a restart, lest a job meet another's files
FirstJobId=$(($(date +%s) / 2 % 50000000))
MinJobAge=600
JobRequeue=1
# a node that was lost returns by itself, one set down by hand does not
ReturnToService=1
SlurmdTimeout=10
MessageTimeout=5
KillWait=5
BatchStartTimeout=20
UnkillableStepTimeout=20
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
# jobs in partition low are requeued when main or short needs their nodes
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs=$CPUS RealMemory=$MEM Gres=gpu:$GPUS State=UNKNOWN
CONF
    for ((i = 0; i <= last; i++)); do echo "NodeName=node$i NodeAddr=$NET.$((10 + i))"; done
    cat <<CONF
PartitionName=main Nodes=node[0-$last] Default=YES MaxTime=INFINITE PriorityTier=10 State=UP
PartitionName=short Nodes=node[0-$last] MaxTime=00:10:00 PriorityTier=10 State=UP
PartitionName=low Nodes=node[0-$last] MaxTime=INFINITE PriorityTier=1 GraceTime=5 State=UP
CONF
    if [[ $ACCT == 1 ]]; then
      cat <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$NET.1
AccountingStoragePort=$((PORT + 2))
AccountingStoragePass=$DIR/run/munge.socket
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
CONF
    else # sacct -c still lists the jobs that have ended
      cat <<CONF
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp
CONF
    fi
  } >"$DIR/slurm.conf"

  # slurmd takes only device nodes for GPUs: these are copies of /dev/null
  for ((i = 0; i < GPUS; i++)); do
    [[ -c $DIR/dev/nvidia$i ]] || mknod -m 666 "$DIR/dev/nvidia$i" c 1 3
  done
  if ((GPUS > 0)); then
    echo "NodeName=node[0-$last] Name=gpu File=$DIR/dev/nvidia[0-$((GPUS - 1))] Flags=nvidia_gpu_env"
  fi >"$DIR/gres.conf"

  {
    echo "$NET.1 $here"
    for ((i = 0; i <= last; i++)); do echo "$NET.$((10 + i)) node$i"; done
    grep -vw -- "$here" /etc/hosts
  } >"$DIR/hosts"

  cat >"$DIR/node-init" <<'INIT'
# PID 1 of a node; bash reaps what is left to it
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
slurmd -D -N "$1" &
while :; do wait; sleep 1; done
INIT
}

# --- Network: a bridge on this machine, and into it one veth from each node's namespace

netns() { echo "dc$ID-$1"; } # NODE

net_up() { # N
  local i
  # nothing meant for a node that is gone leaves by the default route
  ip route replace unreachable "$NET.0/24" metric 4096
  ip link add "$BRIDGE" type bridge
  ip addr add "$NET.1/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  for ((i = 0; i < $1; i++)); do
    ip netns add "$(netns "node$i")"
    ip link add "dc${ID}v$i" type veth peer name eth0 netns "$(netns "node$i")"
    ip link set "dc${ID}v$i" master "$BRIDGE" up
    ip -n "$(netns "node$i")" addr add "$NET.$((10 + i))/24" dev eth0
    ip -n "$(netns "node$i")" link set lo up
    ip -n "$(netns "node$i")" link set eth0 up
  done
}

net_down() {
  local name
  for name in $(ip -o link show type veth | grep -o "\bdc${ID}v[0-9]*"); do ip link del "$name" || true; done
  for name in $(ip netns list | grep -o "^dc$ID-node[0-9]*"); do ip netns del "$name"; done
  ip link del "$BRIDGE" 2>/dev/null || true
  ip route del unreachable "$NET.0/24" metric 4096 2>/dev/null || true
}

# --- Parts

nodes() { sed -n 's/^NodeName=\(node[0-9]*\) .*/\1/p' "$DIR/slurm.conf" 2>/dev/null; }

known() { nodes | grep -qx -- "$1" || die "no node called '$1'"; }

up() { [[ $(sinfo -h -N -p main -n "$1" -o %T) =~ ^(idle|mixed|allocated|completing|down|drain.*)$ ]]; }

start_node() { # NODE
  alive "$1" >/dev/null && return
  mkdir -p "$DIR/spool/$1"
  ip -n "$(netns "$1")" link set eth0 up
  spawn "$1" nsenter --net="/run/netns/$(netns "$1")" unshare --mount --uts --pid --fork --mount-proc \
    --kill-child bash "$DIR/node-init" "$1" "$DIR"
}

start_munged() {
  [[ -f $DIR/munge.key ]] || (umask 077; head -c 1024 /dev/urandom >"$DIR/munge.key")
  spawn munged munged --foreground --force --key-file="$DIR/munge.key" \
    --socket="$DIR/run/munge.socket" --pid-file="$DIR/run/munged.own.pid" \
    --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munged.seed"
  waitfor 30 munged munge -n -S "$DIR/run/munge.socket"
}

start_slurmctld() {
  spawn slurmctld slurmctld -D
  waitfor 50 slurmctld scontrol ping
}

start_slurmdbd() {
  mkdir -p "$DB"
  chown mysql: "$DB"
  mariadb-install-db --no-defaults --user=mysql --datadir="$DB" --skip-test-db >"$DIR/log/install-db.out" 2>&1
  spawn mariadbd mariadbd --no-defaults --user=mysql --datadir="$DB" --socket="$DB/sock" \
    --pid-file="$DB/pid" --skip-networking --innodb-buffer-pool-size=128M \
    --innodb-log-file-size=16M --innodb-lock-wait-timeout=900
  waitfor 90 mariadbd mariadb --no-defaults -S "$DB/sock" -e 'select 1'
  mariadb --no-defaults -S "$DB/sock" -e "create user slurm@localhost identified by 'devcluster';
    grant all on slurm_acct_db.* to slurm@localhost"
  (umask 077; cat >"$DIR/slurmdbd.conf") <<CONF
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.socket
DbdHost=$(hostname -s)
DbdAddr=$NET.1
DbdPort=$((PORT + 2))
SlurmUser=root
PidFile=$DIR/run/slurmdbd.own.pid
LogFile=$DIR/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=devcluster
CONF
  MYSQL_UNIX_PORT=$DB/sock spawn slurmdbd slurmdbd -D
  waitfor 60 slurmdbd sacctmgr -n show cluster
  sacctmgr -i add cluster devcluster >/dev/null
  sacctmgr -i add account research >/dev/null
  sacctmgr -i add user root account=research >/dev/null
}

halt() { # all goes but the munge key and the logs of this run
  local pidfile
  finish slurmctld
  for pidfile in "$DIR"/run/node*.pid; do
    if [[ -e $pidfile ]]; then finish "$(basename "$pidfile" .pid)" KILL; fi
  done
  finish slurmdbd
  finish mariadbd KILL
  finish munged
  net_down
  if mountpoint -q "$DIR/disk"; then umount --lazy "$DIR/disk"; fi
  if [[ -d $DIR/log ]]; then rm -rf "$DIR/log.last"; mv "$DIR/log" "$DIR/log.last"; fi
  rm -rf "$DB" "$DIR"/{run,state,spool,disk,hosts,node-init} "$DIR"/{slurm,gres,slurmdbd}.conf
}

# --- Commands

lock() {
  mkdir -p "$DIR"
  [[ -O $DIR && ! -L $DIR ]] || die "$DIR is not yours: set DEVCLUSTER_DIR to another folder"
  exec 9>"$DIR/lock"
  flock 9
}

missing() { # TOOL ...; prints those that are not installed
  local tool
  for tool; do command -v "$tool" >/dev/null || echo -n "$tool "; done
}

unable() { # prints why this machine cannot run it, if so
  local tools=(slurmctld slurmd munged ip flock unshare nsenter) lacking
  if [[ $ACCT == 1 ]]; then tools+=(slurmdbd mariadbd mariadb-install-db); fi
  if [[ $(uname) != Linux ]]; then echo "the development cluster needs Linux"; return; fi
  if ((EUID)); then echo "the development cluster needs root"; return; fi
  lacking=$(missing "${tools[@]}")
  if [[ $lacking ]]; then echo "not installed: $lacking(slurm/devcluster.sh install)"; return; fi
  unshare --mount --uts --pid --net --fork true 2>/dev/null ||
    echo "this machine (a container?) forbids new namespaces, which the development cluster needs"
}

cmd_can() {
  local reason
  reason=$(unable)
  if [[ $reason ]]; then echo "$reason"; return 1; fi
}

cmd_install() {
  local packages=() log
  if [[ $(missing slurmctld slurmd srun) ]]; then packages+=(slurm-wlm); fi
  if [[ $(missing munged) ]]; then packages+=(munge); fi
  if [[ $(missing ip) ]]; then packages+=(iproute2); fi
  if [[ $(missing flock unshare nsenter) ]]; then packages+=(util-linux); fi
  if [[ $(missing slurmdbd) ]]; then packages+=(slurmdbd); fi
  if [[ $(missing mariadbd mariadb-install-db) ]]; then packages+=(mariadb-server); fi
  if [[ ${#packages[@]} == 0 || $(uname) != Linux ]]; then return; fi
  if ((EUID)); then die "no Slurm for the tests: apt-get install ${packages[*]} needs root"; fi
  command -v apt-get >/dev/null || die "no Slurm for the tests: this machine has no apt-get to install ${packages[*]}"
  echo "devcluster: installing ${packages[*]}"
  log=$(mktemp)
  apt_install "${packages[@]}" >"$log" 2>&1 || { tail -n 5 "$log" >&2; rm "$log"; die "apt-get could not install ${packages[*]}"; }
  rm "$log"
}

apt_install() { # PACKAGE ...
  local policy=/usr/sbin/policy-rc.d apt=(apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
  export DEBIAN_FRONTEND=noninteractive
  if [[ ! -e $policy ]]; then # else the packages would start daemons of their own
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  if [[ -z $(find /var/lib/apt/lists -maxdepth 1 -name '*Packages*' -mtime -1 2>/dev/null) ]]; then
    "${apt[@]}" update || true # old lists may do
  fi
  "${apt[@]}" install -y --no-install-recommends "$@" </dev/null ||
    { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "$@" </dev/null; }
}

cmd_start() { # [N]
  local n=${1:-5} name reason wanted
  if [[ ! $n =~ ^[0-9]{1,3}$ ]] || ((n < 1 || n > 200)); then die "start takes a number of nodes, 1 to 200"; fi
  if [[ ! $ID =~ ^[0-9]{1,2}$ ]]; then die "DEVCLUSTER_ID '$ID': a number from 0 to 99"; fi
  reason=$(unable)
  if [[ $reason ]]; then die "$reason"; fi
  lock
  wanted="$n $CPUS $MEM $GPUS $ACCT $OWNER"
  if ! alive munged >/dev/null || ! alive slurmctld >/dev/null || [[ $(<"$DIR/run/wanted") != "$wanted" ]]; then
    halt
    mkdir -p "$DIR"/{run,log,state,spool,dev,disk}
    mount -t tmpfs -o size=100m,mode=700 devcluster "$DIR/disk" # before the nodes, which see what is there at boot
    echo "$wanted" >"$DIR/run/wanted"
    if [[ $OWNER ]]; then spawn owner "$0" follow "$OWNER"; fi
    write_config "$n"
    net_up "$n"
    start_munged
    if [[ $ACCT == 1 ]]; then start_slurmdbd; fi
    start_slurmctld
  fi
  for name in $(nodes); do start_node "$name"; done
  for name in $(nodes); do waitfor 60 "$name" up "$name"; done
  echo "devcluster: $n nodes up; export SLURM_CONF=$SLURM_CONF"
}

cmd_stop() {
  [[ -d $DIR ]] || return 0
  lock
  finish owner
  halt
}

cmd_follow() { # PID; ends the cluster after that process
  while kill -0 "$1" 2>/dev/null; do sleep 1; done
  lock
  [[ $(alive owner) == $$ ]] || return 0 # another start came first
  rm -f "$DIR/run/owner.pid"
  halt
}

cmd_status() {
  local name pid rc=0
  [[ -f $DIR/slurm.conf ]] || { echo "devcluster: stopped"; return 1; }
  for name in munged slurmctld $(nodes); do
    if pid=$(alive "$name"); then echo "$name: pid $pid"; else echo "$name: not running"; rc=1; fi
  done
  if alive slurmctld >/dev/null; then sinfo -N -p main -o '%N %T %G %E'; fi
  return $rc
}

cmd_login() { # CMD ...
  [[ -f $DIR/hosts ]] || die "not started"
  exec unshare --mount sh -c 'mount --bind "$0" /etc/hosts; exec "$@"' "$DIR/hosts" "$@"
}

first_process() { # NODE PID; the node's PID 1, unshare's child, once it has taken the node's name
  local child i
  for ((i = 0; i < 200; i++)); do
    read -r child _ <"/proc/$2/task/$2/children" || true
    if [[ -n ${child:-} && $(nsenter --target "$child" --uts hostname 2>/dev/null) == "$1" ]]; then
      echo "$child"
      return
    fi
    sleep 0.05
  done
  return 1
}

cmd_enter() { # NODE CMD ...
  local pid
  known "$1"
  pid=$(alive "$1") || die "$1 is off"
  pid=$(first_process "$1" "$pid") || die "$1 is not up yet"
  shift
  exec nsenter --target "$pid" --mount --uts --pid --net -- "$@"
}

cmd_crash() { # NODE
  if [[ $1 == slurmctld ]]; then finish slurmctld; return; fi   # in order, so the queue is saved
  known "$1"
  ip -n "$(netns "$1")" link set eth0 down
  finish "$1" KILL
}

cmd_boot() { # NODE
  if [[ $1 == slurmctld ]]; then alive slurmctld >/dev/null || start_slurmctld; return; fi
  known "$1"
  start_node "$1"
}

case ${1:-} in
  install | can | stop | status) "cmd_$1" ;;
  start) cmd_start "${2:-}" ;;
  follow) cmd_follow "$2" ;; # for itself
  env) echo "export SLURM_CONF=$SLURM_CONF" ;;
  login | enter) "cmd_$1" "${@:2}" ;;
  crash | boot) "cmd_$1" "${2:?which node?}" ;;
  *) sed -n '2,/^set -/{s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
