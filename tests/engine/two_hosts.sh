# Run torchrun on two hosts, which are network namespaces: unshare -rnmu bash two_hosts.sh FOLDER 4|6|name COMMAND…
# Each host resolves its own name to a loopback address, as Debian and Ubuntu set it up.
set -e
folder=$1 kind=$2
shift 2
unshare -nmu sleep 300 &
other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link add one type veth peer name two
ip link set two netns $other
on_other() { nsenter -t $other -n -m -u "$@"; }
link() {  # prefix, name, host number
    $1 ip address add 10.0.0.$3/24 dev $2
    $1 ip address add fd00::$3/64 dev $2 nodad
    $1 ip link set $2 up
    $1 ip link set lo up
}
link "" one 1
link on_other two 2
hostname host1
on_other hostname host2
case $kind in
    6) first=fd00::1 second=fd00::2 self=::1 master=fd00::1 ;;
    4) first=10.0.0.1 second=10.0.0.2 self=127.0.1.1 master=10.0.0.1 ;;
    name) first=10.0.0.1 second=10.0.0.2 self=127.0.1.1 master=host1 ;;
esac
printf '127.0.0.1 localhost\n%s host1\n%s host2\n' $self $second > "$folder/hosts1"
printf '127.0.0.1 localhost\n%s host1\n%s host2\n' $first $self > "$folder/hosts2"
mount --bind "$folder/hosts1" /etc/hosts
on_other mount --bind "$folder/hosts2" /etc/hosts
torchrun="$PYTHON -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr $master --master-port 29511"
on_other $torchrun --node-rank 1 -m "$@" > "$folder/second" 2>&1 &
second=$!
$torchrun --node-rank 0 -m "$@"
wait $second
