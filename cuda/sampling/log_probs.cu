// Logits, or log probabilities (the log-softmax), of some tokens of each row, after the temperature.
#include "sampling/choice.cuh"

// Grid: (rows).
template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 2) log_probs(
    float* values,                // [rows, count]
    const T* logits,              // [rows, vocab_size]
    const int* tokens,            // [rows, count]
    const Params* params,         // [slots]
    const unsigned char* wanted,  // [slots]: 0: nothing, 1: logits, 2: log probabilities
    const int* slots,             // [rows], -1: no slot, nothing is written
    int vocab_size, int count) {
    ptx::wait_for_previous();
    int slot = slots[blockIdx.x], kind = slot < 0 ? 0 : wanted[slot];
    if (kind == 0) return;
    float temperature = params[slot].temperature;
    const T* own = logits + size_t(blockIdx.x) * vocab_size;
    values += size_t(blockIdx.x) * count;
    tokens += size_t(blockIdx.x) * count;
    if (kind == 1) {
        for (int i = threadIdx.x; i < count; i += THREADS) {
            values[i] = __fdiv_rn(to_float(own[tokens[i]]), temperature);
        }
        return;
    }
    float own_best;
    Mass mass = block_mass(ScaledRow<T, WIDTH>{own, vocab_size, temperature, INFINITY}, own_best);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        float logit = to_float(own[tokens[i]]), scaled = __fdiv_rn(logit, temperature);
        double value = double(scaled) - double(mass.largest) - log(mass.sum);
        // If dividing by the temperature overflows to +inf for a token, all values are 0. If it overflows to
        // -inf for all tokens, the values of finite logits are 0.
        if (!isfinite(mass.largest)) value = mass.largest > 0 || logit > -INFINITY ? 0 : -INFINITY;
        values[i] = float(value);
    }
}
