// One decode step of a stack of transformer blocks with 8-bit weights: the compiled form of block.py, which explains it.
//
// All threads run through the blocks together and wait for each other four times a block. What is cheap, such as norms,
// every thread computes for itself instead.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr float kTiny = 1e-30f;  // minimum scale, for blocks of zeros
constexpr int64_t kBlock = 32;   // inputs that share a scale

enum NormKind : int32_t { kNone, kLayerNorm, kRmsNorm, kCosine };
enum Activation : int32_t { kRelu, kGelu, kGeluTanh, kQuickGelu, kSilu };

}  // namespace

extern "C" {

struct Norm {
    const float* weight;  // (D,), or (heads,) for kCosine; or null
    const float* bias;    // (D,) or null
    float eps;
    int32_t kind;
};

struct Linear {
    const uint8_t* weight;  // (out / 16, in / 4, 16, 4): integers plus 128, padded
    const float* scale;     // (out,)
    const float* bias;      // (out,) or null
    int64_t out, in;
};

struct Block {
    Norm norm1, norm_cross, norm2, norm_q, norm_k, norm_cross_q;
    Linear qkv, proj, cross_q, cross_proj, fc1, fc2;
    float scale, cross_scale;
};

struct Model {
    int64_t dim, heads, kv_heads, head_dim, hidden, num_blocks;
    int32_t activation, gated, has_cross, levels;  // inputs are rounded to -levels to levels
    const Block* blocks;
};

// Keys or values (rows, heads, length, head_dim), with the strides of the first two axes in floats.
struct Memory {
    float* data;
    int64_t row, head;
};

struct Step {
    int64_t rows, place, length;        // the slot that new keys are written to, and the number of valid slots
    int64_t context_length;             // of a prefix, or of states for cross-attention
    const float *cos, *sin;             // (rows or 1, head_dim / 2) or null
    int64_t rotation_row;               // stride, 0 if shared
    const float* bias;                  // (rows or 1, heads or 1, prefix + length) or null
    int64_t bias_row, bias_head;
    const float* context_bias;          // (rows or 1, context_length) or null, for cross-attention
    int64_t context_bias_row;
    const Memory* caches;               // keys and values of each block
    const Memory* contexts;             // the same of the context
    int32_t threads;
};

}  // extern "C"

namespace {

// exp to 2 units in the last place, in a form that compilers vectorise: 2^n times a polynomial (Cephes, expf).
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

void activate(int32_t kind, float* x, int64_t count) {
    switch (kind) {
        case kRelu:
            for (int64_t i = 0; i < count; ++i) x[i] = std::max(x[i], 0.0f);
            break;
        case kGelu:
            for (int64_t i = 0; i < count; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
            break;
        case kGeluTanh:  // 0.5 (1 + tanh(a)) = sigmoid(2 a)
            for (int64_t i = 0; i < count; ++i) {
                x[i] *= sigmoid(1.59576912f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
            }
            break;
        case kQuickGelu:
            for (int64_t i = 0; i < count; ++i) x[i] *= sigmoid(1.702f * x[i]);
            break;
        default:
            for (int64_t i = 0; i < count; ++i) x[i] *= sigmoid(x[i]);
    }
}

void normalize(const Norm& norm, const float* x, float* y, int64_t dim, int64_t head = 0) {
    if (norm.kind == kNone) {
        if (x != y) std::memcpy(y, x, dim * sizeof(float));
        return;
    }
    float mean = 0, square = 0;
    if (norm.kind == kLayerNorm) {
        for (int64_t i = 0; i < dim; ++i) mean += x[i];
        mean /= dim;
    }
    for (int64_t i = 0; i < dim; ++i) square += (x[i] - mean) * (x[i] - mean);
    if (norm.kind == kCosine) {
        const float factor = (norm.weight ? norm.weight[head] : 1.0f) / std::max(std::sqrt(square), norm.eps);
        for (int64_t i = 0; i < dim; ++i) y[i] = x[i] * factor;
        return;
    }
    const float factor = 1.0f / std::sqrt(square / dim + norm.eps);
    for (int64_t i = 0; i < dim; ++i) y[i] = (x[i] - mean) * factor;
    if (norm.weight) for (int64_t i = 0; i < dim; ++i) y[i] *= norm.weight[i];
    if (norm.bias) for (int64_t i = 0; i < dim; ++i) y[i] += norm.bias[i];
}

int64_t padded(int64_t in) { return (in + 3) / 4 * 4; }
int64_t blocks_of(int64_t in) { return (in + kBlock - 1) / kBlock; }

// Inputs of a product in 8 bits, with a scale for every block of each row: a thread's own copy of all rows. A block is
// small, because the scale of a row would follow its largest value, beside which language models' others are tiny.
struct Inputs {
    std::vector<int8_t> values;   // (rows, padded(in)), the padding 0
    std::vector<float> scales;    // (rows, blocks)
    std::vector<int32_t> shifts;  // (rows, blocks): what the 128 that is added to weights contributes, negative

    void reserve(int64_t rows, int64_t in) {
        const size_t blocks = rows * blocks_of(in);
        values.resize(std::max<size_t>(values.size(), rows * padded(in)));
        scales.resize(std::max(scales.size(), blocks));
        shifts.resize(std::max(shifts.size(), blocks));
    }

    void quantize_row(const float* x, int64_t in, int levels, int64_t row) {
        int8_t* y = values.data() + row * padded(in);
        const int64_t blocks = blocks_of(in);
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t first = b * kBlock, last = std::min(in, first + kBlock);
            float size = kTiny;
            for (int64_t i = first; i < last; ++i) size = std::max(size, std::fabs(x[i]));
            const float factor = levels / size;
            int32_t sum = 0;
            for (int64_t i = first; i < last; ++i) {
                const int32_t value = static_cast<int32_t>(std::nearbyint(x[i] * factor));
                y[i] = static_cast<int8_t>(value);
                sum += value;
            }
            scales[row * blocks + b] = size / levels;
            shifts[row * blocks + b] = -128 * sum;
        }
        for (int64_t i = in; i < padded(in); ++i) y[i] = 0;
    }
};

// Sums of kLanes outputs, and `multiply_add`: four inputs times their weights. `accumulate` adds x times a scale to y.
#if defined(__AVX512F__) && defined(__AVX512VNNI__)

constexpr int kLanes = 16;
constexpr int kRows = 6, kGroups = 2;  // of a tile, whose sums stay in registers
using Sums = __m512i;
using Totals = __m512;

inline Sums fill(int32_t value) { return _mm512_set1_epi32(value); }

inline Sums multiply_add(Sums sums, const int8_t* x, const uint8_t* weight) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(weight), _mm512_set1_epi32(four));
}

inline Totals accumulate(Totals y, Sums x, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(scale), y);
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int kLanes = 8;
constexpr int kRows = 3, kGroups = 2;
using Sums = __m256i;
using Totals = __m256;

inline Sums fill(int32_t value) { return _mm256_set1_epi32(value); }

inline Sums multiply_add(Sums sums, const int8_t* x, const uint8_t* weight) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    // Pairs of products are added in 16 bits, which inputs of 7 bits cannot exceed: see `levels` in packed.py.
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight));
    const __m256i pairs = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(four));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

inline Totals accumulate(Totals y, Sums x, float scale) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(scale), y);
}

#else

constexpr int kLanes = 1;
constexpr int kRows = 2, kGroups = 2;
using Sums = int32_t;
using Totals = float;

inline Sums fill(int32_t value) { return value; }

inline Sums multiply_add(Sums sums, const int8_t* x, const uint8_t* weight) {
    for (int i = 0; i < 4; ++i) sums += static_cast<int32_t>(x[i]) * weight[i];
    return sums;
}

inline Totals accumulate(Totals y, Sums x, float scale) { return y + static_cast<float>(x) * scale; }

#endif

constexpr int kParts = 16 / kLanes;  // of a group

// Outputs of GROUPS groups of 16 from the group `first` on, of ROWS rows from `row` on: y = x W^T + b, or y += it.
template <int ROWS, int GROUPS>
inline void multiply_tile(const Linear& layer, const Inputs& inputs, int64_t row, int64_t first, float* y,
                          int64_t stride, bool add) {
    const int64_t in = padded(layer.in), group = 16 * in, blocks = blocks_of(layer.in);
    const uint8_t* weight = layer.weight + first * group;
    const int8_t* x = inputs.values.data() + row * in;
    const float* scales = inputs.scales.data() + row * blocks;
    const int32_t* shifts = inputs.shifts.data() + row * blocks;
    Totals totals[ROWS][GROUPS][kParts] = {};
    for (int64_t b = 0; b < blocks; ++b) {
        Sums sums[ROWS][GROUPS][kParts];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 32
            for (int g = 0; g < GROUPS * kParts; ++g) sums[r][g / kParts][g % kParts] = fill(shifts[r * blocks + b]);
        }
        const int64_t last = std::min(in, (b + 1) * kBlock);
        for (int64_t k = b * kBlock; k < last; k += 4) {
#pragma GCC unroll 32
            for (int g = 0; g < GROUPS * kParts; ++g) {
                const uint8_t* four = weight + g / kParts * group + 16 * k + 4 * kLanes * (g % kParts);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    Sums& sum = sums[r][g / kParts][g % kParts];
                    sum = multiply_add(sum, x + r * in + k, four);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const float scale = scales[r * blocks + b];
#pragma GCC unroll 32
            for (int g = 0; g < GROUPS * kParts; ++g) {
                Totals& total = totals[r][g / kParts][g % kParts];
                total = accumulate(total, sums[r][g / kParts][g % kParts], scale);
            }
        }
    }
    for (int g = 0; g < GROUPS; ++g) {
        const int64_t n = 16 * (first + g), count = std::min<int64_t>(16, layer.out - n);
        for (int r = 0; r < ROWS; ++r) {
            float values[16];
            for (int p = 0; p < kParts; ++p) {
                const Totals total = totals[r][g][p];
                std::memcpy(values + kLanes * p, &total, sizeof total);
            }
            float* place = y + r * stride + n;
            for (int64_t o = 0; o < count; ++o) {
                const float value = values[o] * layer.scale[n + o] + (layer.bias ? layer.bias[n + o] : 0.0f);
                place[o] = add ? place[o] + value : value;
            }
        }
    }
}

template <int GROUPS>
void multiply_rows(const Linear& layer, const Inputs& x, int64_t rows, int64_t first, float* y, int64_t stride,
                   bool add) {
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows) multiply_tile<kRows, GROUPS>(layer, x, r, first, y + r * stride, stride, add);
    for (; r + 2 <= rows; r += 2) multiply_tile<2, GROUPS>(layer, x, r, first, y + r * stride, stride, add);
    for (; r < rows; ++r) multiply_tile<1, GROUPS>(layer, x, r, first, y + r * stride, stride, add);
}

struct Range {
    int64_t first, last;
};

// The part of `count` items that a thread computes.
Range share(int64_t count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

int64_t groups_of(int64_t outputs) { return (outputs + 15) / 16; }

// Groups of 16 outputs, of all rows. Weights stay in the cache while all rows use them. For a single row, they are read
// strictly in order, as fast as memory allows: with two groups at a time, processors fetch less ahead.
void multiply(const Linear& layer, const Inputs& x, int64_t rows, Range groups, float* y, int64_t stride, bool add) {
    int64_t g = groups.first;
    for (; rows > 1 && g + kGroups <= groups.last; g += kGroups) multiply_rows<kGroups>(layer, x, rows, g, y, stride, add);
    for (; g < groups.last; ++g) multiply_rows<1>(layer, x, rows, g, y, stride, add);
}

void rotate(float* x, const float* cos, const float* sin, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

// Keys and values of one head: `count` slots, of which one may lie elsewhere.
struct Keys {
    const float *keys, *values;
    int64_t count, place;
    const float *new_key, *new_value;
};

void attend(const float* query, const Keys* parts, int num_parts, const float* bias, float scale, int64_t head_dim,
            float* weights, float* out) {
    float largest = -INFINITY;
    int64_t total = 0;
    for (int p = 0; p < num_parts; ++p) {
        const Keys& part = parts[p];
        for (int64_t s = 0; s < part.count; ++s, ++total) {
            const float* key = s == part.place ? part.new_key : part.keys + s * head_dim;
            float product = 0;
            for (int64_t i = 0; i < head_dim; ++i) product += query[i] * key[i];
            weights[total] = product * scale + (bias ? bias[total] : 0.0f);
            largest = std::max(largest, weights[total]);
        }
    }
    float sum = 0;
    for (int64_t s = 0; s < total; ++s) {
        const float difference = weights[s] - largest;
        weights[s] = difference < -87.0f ? 0.0f : exponential(difference);  // of masked keys exactly 0
        sum += weights[s];
    }
    std::memset(out, 0, head_dim * sizeof(float));
    total = 0;
    for (int p = 0; p < num_parts; ++p) {
        const Keys& part = parts[p];
        for (int64_t s = 0; s < part.count; ++s, ++total) {
            const float weight = weights[total] / sum;
            const float* value = s == part.place ? part.new_value : part.values + s * head_dim;
            for (int64_t i = 0; i < head_dim; ++i) out[i] += weight * value[i];
        }
    }
}

// Buffers that all threads share, and that live as long as the step.
struct Shared {
    std::vector<float> qkv, attended, hidden;
};

// What one thread computes in a step.
class Worker {
   public:
    Worker(const Model& model, const Step& step, float* x, Shared& shared, int thread, int threads)
        : model_(model), step_(step), x_(x), shared_(shared), thread_(thread), threads_(threads) {
        width_ = model.heads * model.head_dim;
        weights_.resize(step.length + step.context_length);
        query_.resize(model.head_dim);
        key_.resize(model.head_dim);
        row_.resize(std::max(model.dim, std::max(width_, model.hidden)));
    }

    void run() {
        for (int64_t b = 0; b < model_.num_blocks; ++b) {
            const Block& block = model_.blocks[b];
            const Memory* cache = step_.caches + 2 * b;
            const Memory* context = step_.contexts ? step_.contexts + 2 * b : nullptr;
            project_normed(block.norm1, block.qkv, shared_.qkv.data());
            attend_cache(block, cache, model_.has_cross ? nullptr : context);
            add_projected(block.proj, shared_.attended.data(), width_);
            if (model_.has_cross && context) {
                project_normed(block.norm_cross, block.cross_q, shared_.qkv.data());
                attend_context(block, context);
                add_projected(block.cross_proj, shared_.attended.data(), width_);
            }
            feed_forward(block);
        }
    }

   private:
    void quantize_inputs(const float* x, int64_t in, int64_t stride, const Norm* norm = nullptr) {
        inputs_.reserve(step_.rows, in);
        for (int64_t r = 0; r < step_.rows; ++r) {
            const float* row = x + r * stride;
            if (norm) normalize(*norm, row, row_.data(), in);
            inputs_.quantize_row(norm ? row_.data() : row, in, model_.levels, r);
        }
    }

    Range own_groups(int64_t outputs) { return share(groups_of(outputs), thread_, threads_); }

    void project_normed(const Norm& norm, const Linear& layer, float* y) {
        quantize_inputs(x_, layer.in, layer.in, &norm);
        multiply(layer, inputs_, step_.rows, own_groups(layer.out), y, layer.out, false);
#pragma omp barrier
    }

    void add_projected(const Linear& layer, const float* inputs, int64_t stride) {
        quantize_inputs(inputs, layer.in, stride);
        multiply(layer, inputs_, step_.rows, own_groups(layer.out), x_, layer.out, true);
#pragma omp barrier
    }

    void feed_forward(const Block& block) {
        quantize_inputs(x_, model_.dim, model_.dim, &block.norm2);
        const int64_t hidden = model_.hidden, stride = block.fc1.out;
        const Range groups = own_groups(hidden);
        float* y = shared_.hidden.data();
        multiply(block.fc1, inputs_, step_.rows, groups, y, stride, false);
        if (model_.gated) {  // hidden is a multiple of 16
            const Range values = {groups.first + hidden / 16, groups.last + hidden / 16};
            multiply(block.fc1, inputs_, step_.rows, values, y, stride, false);
        }
        const int64_t first = std::min(16 * groups.first, hidden), last = std::min(16 * groups.last, hidden);
        for (int64_t r = 0; r < step_.rows; ++r) {
            float* row = y + r * stride;
            activate(model_.activation, row + first, last - first);
            if (model_.gated) {
                for (int64_t i = first; i < last; ++i) row[i] *= row[hidden + i];
            }
        }
#pragma omp barrier
        add_projected(block.fc2, y, stride);
    }

    void attend_cache(const Block& block, const Memory* cache, const Memory* prefix) {
        const int64_t size = model_.head_dim, group = model_.heads / model_.kv_heads;
        const int64_t stride = (model_.heads + 2 * model_.kv_heads) * size;
        const Range tasks = share(step_.rows * model_.heads, thread_, threads_);
        for (int64_t task = tasks.first; task < tasks.last; ++task) {
            const int64_t row = task / model_.heads, head = task % model_.heads, kv = head / group;
            const float* qkv = shared_.qkv.data() + row * stride;
            const float* value = qkv + (model_.heads + model_.kv_heads + kv) * size;
            normalize(block.norm_q, qkv + head * size, query_.data(), size, head);
            normalize(block.norm_k, qkv + (model_.heads + kv) * size, key_.data(), size, kv);
            if (step_.cos) {
                const float *cos = step_.cos + row * step_.rotation_row, *sin = step_.sin + row * step_.rotation_row;
                rotate(query_.data(), cos, sin, size);
                rotate(key_.data(), cos, sin, size);
            }
            float* keys = cache[0].data + row * cache[0].row + kv * cache[0].head;
            float* values = cache[1].data + row * cache[1].row + kv * cache[1].head;
            if (head % group == 0) {  // other heads of the group, in other threads, use their own copies
                std::memcpy(keys + step_.place * size, key_.data(), size * sizeof(float));
                std::memcpy(values + step_.place * size, value, size * sizeof(float));
            }
            Keys parts[2];
            int count = 0;
            if (prefix) {
                parts[count++] = {prefix[0].data + row * prefix[0].row + kv * prefix[0].head,
                                  prefix[1].data + row * prefix[1].row + kv * prefix[1].head,
                                  step_.context_length, -1, nullptr, nullptr};
            }
            parts[count++] = {keys, values, step_.length, step_.place, key_.data(), value};
            const float* bias = step_.bias ? step_.bias + row * step_.bias_row + head * step_.bias_head : nullptr;
            attend(query_.data(), parts, count, bias, block.scale, size, weights_.data(),
                   shared_.attended.data() + row * width_ + head * size);
        }
#pragma omp barrier
    }

    void attend_context(const Block& block, const Memory* context) {
        const int64_t size = model_.head_dim, group = model_.heads / model_.kv_heads;
        const Range tasks = share(step_.rows * model_.heads, thread_, threads_);
        for (int64_t task = tasks.first; task < tasks.last; ++task) {
            const int64_t row = task / model_.heads, head = task % model_.heads, kv = head / group;
            normalize(block.norm_cross_q, shared_.qkv.data() + row * width_ + head * size, query_.data(), size, head);
            const Keys part = {context[0].data + row * context[0].row + kv * context[0].head,
                               context[1].data + row * context[1].row + kv * context[1].head,
                               step_.context_length, -1, nullptr, nullptr};
            const float* bias = step_.context_bias ? step_.context_bias + row * step_.context_bias_row : nullptr;
            attend(query_.data(), &part, 1, bias, block.cross_scale, size, weights_.data(),
                   shared_.attended.data() + row * width_ + head * size);
        }
#pragma omp barrier
    }

    const Model& model_;
    const Step& step_;
    float* x_;
    Shared& shared_;
    const int thread_, threads_;
    int64_t width_;
    Inputs inputs_;
    std::vector<float> weights_, query_, key_, row_;
};

}  // namespace

extern "C" {

// Passes the residual stream x (rows, dim) of one new token per row through all blocks, in place.
void run_blocks(const Model* model, const Step* step, float* x) {
    Shared shared;
    const int64_t rows = step->rows, heads = model->heads + 2 * model->kv_heads;
    shared.qkv.resize(rows * heads * model->head_dim);
    shared.attended.resize(rows * model->heads * model->head_dim);
    shared.hidden.resize(rows * model->hidden * (model->gated ? 2 : 1));
#pragma omp parallel num_threads(step->threads)
    {
        Worker worker(*model, *step, x, shared, omp_get_thread_num(), omp_get_num_threads());
        worker.run();
    }
}

// A linear layer: x (rows, in) -> y (rows, out).
void run_linear(const Linear* layer, const float* x, float* y, int64_t rows, int32_t levels, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        Inputs inputs;
        inputs.reserve(rows, layer->in);
        for (int64_t r = 0; r < rows; ++r) inputs.quantize_row(x + r * layer->in, layer->in, levels, r);
        const Range groups = share(groups_of(layer->out), omp_get_thread_num(), omp_get_num_threads());
        multiply(*layer, inputs, rows, groups, y, layer->out, false);
    }
}

}  // extern "C"
