// Log probabilities of one token from each row of logits: the log-softmax behind the temperature.
#include "choice.cuh"

// Grid: (rows).
template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 2) log_probs(
    float* values,                // [rows]
    const T* logits,              // [rows, vocab_size]
    const int* tokens,            // [rows]
    const Params* params,         // [slots]
    const unsigned char* wanted,  // [slots]: 0: nothing, 1: the logit, 2: its log probability
    const int* slots,             // [rows], -1: none
    int vocab_size) {
    ptx::wait_for_previous();
    int slot = slots[blockIdx.x], kind = slot < 0 ? 0 : wanted[slot];
    if (kind == 0) return;
    float temperature = params[slot].temperature;
    if (!(temperature > 0)) temperature = 1;
    const T* own = logits + size_t(blockIdx.x) * vocab_size;
    float logit = to_float(own[tokens[blockIdx.x]]), scaled = __fdiv_rn(logit, temperature);
    if (kind == 1) {
        if (threadIdx.x == 0) values[blockIdx.x] = scaled;
        return;
    }
    float own_best;
    Mass mass = block_mass(ScaledRow<T, WIDTH>{own, vocab_size, temperature, INFINITY}, own_best);
    if (threadIdx.x) return;
    double value = double(scaled) - double(mass.largest) - log(mass.sum);
    // What is infinitely likely has all mass; so has the token if all quotients overflow to -inf.
    if (!isfinite(mass.largest)) value = mass.largest > 0 || logit > -INFINITY ? 0 : -INFINITY;
    values[blockIdx.x] = float(value);
}
