#!/usr/bin/env bash
# Everything that a change has to pass on a GPU, in about five minutes: benchmarks first, alone; then the demo; then tests, sanitizers and the
# checker's device side together. The extension is built in place (make build). Results and logs go to the folder $1; a short summary is printed last.
set -u
out=${1:?usage: tools/on_gpu.sh FOLDER}
mkdir -p "$out"
export PYTHONPATH=python PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

$python -m margay.bench attention --dims 64,128,256 --peers cuDNN --out "$out" --rounds 5 --ms 8 > "$out/attention.log" 2>&1
$python -m margay.bench attention --dtype float8_e4m3fn --dims 64,128,256 --out "$out" --rounds 3 --ms 4 > "$out/attention-fp8.log" 2>&1
$python -m margay.bench features --out "$out" --rounds 4 --ms 8 > "$out/features.log" 2>&1
$python -m margay.bench decode --out "$out" --rounds 3 --ms 8 > "$out/decode.log" 2>&1
$python -m margay.bench gemm --out "$out" --rounds 5 --ms 10 > "$out/gemm.log" 2>&1
$python -m margay.bench linear_attention --out "$out" --rounds 3 --ms 8 > "$out/linear_attention.log" 2>&1
$python -m margay.bench overhead --out "$out" --rounds 5 > "$out/overhead.log" 2>&1
$python -m margay.demo --out "$out/demo" > "$out/demo.log" 2>&1

export OMP_NUM_THREADS=3
tests() {
  local name=$1
  shift
  timeout 300 $python -m pytest -q --maxfail=8 -p no:cacheprovider "$@" > "$out/tests-$name.log" 2>&1
}
tests attention tests/attention/test_forward_backward.py &
tests features tests/attention/test_features.py &
tests fp8 tests/attention/test_fp8.py &
tests decode tests/attention/test_decode.py tests/test_explain.py &
tests attention-rest tests/attention --ignore-glob='*/test_f*.py' --ignore-glob='*/test_decode.py' &
tests families $(find tests -mindepth 2 -name 'test_*.py' | grep -vE 'tests/(attention|check|drop_ins|runtime|tile)/') tests/test_rows.py &
tests drop-ins tests/drop_ins &
tests torch tests/test_torch.py tests/test_numpy.py tests/test_import.py tests/test_demo.py &
tests rest tests/test_bad_input.py tests/runtime tests/test_docs.py &
tests tile tests/tile &
timeout 300 compute-sanitizer --tool memcheck $python tools/sanitize.py > "$out/memcheck.log" 2>&1 &
timeout 300 compute-sanitizer --tool synccheck $python tools/sanitize.py > "$out/synccheck.log" 2>&1 &
wait
# A process a row, several at a time: nvcc makes the debug builds, and the launches disturb each other, which is welcome here.
$python -c "from margay import _C; print(*(row['name'] for row in _C.kernels() if ('_bf16' in row['name'] or '_e4m3' in row['name']) and row['has_gpu_image']), sep='\n')" |
  xargs -P 8 -I{} sh -c "timeout 200 $python -m margay.check --device {} 2>&1 | sed 's/^/{}: /'" > "$out/device.log"

tail -q -n 9 "$out/attention.log" | cut -c1-160
tail -q -n 7 "$out/attention-fp8.log" | cut -c1-160
grep -h "of the rate" "$out/features.log" | cut -c1-160
tail -q -n 5 "$out/decode.log"
tail -q -n 3 "$out/gemm.log"
cat "$out/overhead.log"
grep -h "speed:\|agree" "$out/demo.log"
for log in "$out"/tests-*.log; do
  grep -hE "^(FAILED|ERROR)" "$log" | cut -c1-200
  echo "$(basename "$log" .log): $(tail -n 1 "$log")"
done
tail -q -n 1 "$out/memcheck.log" "$out/synccheck.log"
grep -h "results change\|the checker has" "$out/device.log"
echo "device: $(grep -c ' 0 findings' "$out/device.log") rows without findings"
