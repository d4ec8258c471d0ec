// One decode step of a stack of transformer blocks, and products of its weights: the compiled form of block.py, which
// explains it. Weights are float32, bfloat16 or integers of 8 bits; everything else is float32.
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

enum WeightKind : int32_t { kInt8, kFloat32, kBfloat16 };
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
    const void* weight;  // (out / 16, in / n, 16, n), padded, with n = 4 for kInt8 (integers plus 128), else 1 or 2
    const float* scale;  // (out,), for kInt8
    const float* bias;   // (out,) or null
    int64_t out, in;
    int32_t kind, levels;  // for kInt8, inputs are rounded to -levels to levels
};

struct Block {
    Norm norm1, norm_cross, norm2, norm_q, norm_k, norm_cross_q;
    Linear qkv, proj, cross_q, cross_proj, fc1, fc2;
    float scale, cross_scale;
};

struct Model {
    int64_t dim, heads, kv_heads, head_dim, hidden, num_blocks;
    int32_t activation, gated, has_cross;
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

constexpr int64_t kAdjacent[] = {4, 1, 2};  // adjacent inputs of a weight, by kind

int64_t padded(const Linear& layer) {
    const int64_t unit = kAdjacent[layer.kind];
    return (layer.in + unit - 1) / unit * unit;
}

int64_t blocks_of(int64_t in) { return (in + kBlock - 1) / kBlock; }

uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

// Rows of inputs in the type that a layer multiplies. In 8 bits, every block of a row has a scale. Blocks are small,
// because a row's scale would follow its largest value, beside which most values of a language model are tiny.
struct Inputs {
    std::vector<float> floats;     // (rows, in)
    std::vector<uint16_t> halves;  // (rows, padded), bfloat16; paddings are 0
    std::vector<int8_t> integers;  // (rows, padded)
    std::vector<float> scales;     // (rows, blocks)
    std::vector<int32_t> shifts;   // (rows, blocks): what the 128 that is added to weights contributes, negative

    void reserve(const Linear& layer, int64_t rows) {
        const auto grow = [rows](auto& values, int64_t size) {
            values.resize(std::max<size_t>(values.size(), rows * size));
        };
        if (layer.kind == kFloat32) return grow(floats, layer.in);
        if (layer.kind == kBfloat16) return grow(halves, padded(layer));
        grow(integers, padded(layer));
        grow(scales, blocks_of(layer.in));
        grow(shifts, blocks_of(layer.in));
    }

    void convert_row(const Linear& layer, const float* x, int64_t row) {
        const int64_t in = layer.in, all = padded(layer);
        if (layer.kind == kFloat32) {
            std::memcpy(floats.data() + row * in, x, in * sizeof(float));
        } else if (layer.kind == kBfloat16) {
            uint16_t* y = halves.data() + row * all;
            for (int64_t i = 0; i < in; ++i) y[i] = to_bfloat16(x[i]);
            std::fill(y + in, y + all, uint16_t{0});
        } else {
            int8_t* y = integers.data() + row * all;
            quantize_row(x, in, layer.levels, y, row);
            std::fill(y + in, y + all, int8_t{0});
        }
    }

   private:
    void quantize_row(const float* x, int64_t in, int levels, int8_t* y, int64_t row) {
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
    }
};

// Sums of kLanes outputs, of integers or floats. `multiply_add` adds the inputs at x times the weights of each output:
// four in 8 bits, one in float32, two in bfloat16. `accumulate` adds integers times a scale.
#if defined(__AVX512F__) && defined(__AVX512VNNI__)

constexpr int kLanes = 16;
constexpr int kRows = 6, kFloatRows = 8, kGroups = 2;  // of a tile, whose sums stay in registers
using Sums = __m512i;
using Totals = __m512;

inline Sums fill(int32_t value) { return _mm512_set1_epi32(value); }

inline Sums broadcast(const void* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return fill(bits);
}

inline Sums multiply_add(Sums sums, const int8_t* x, const uint8_t* weight) {
    return _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(weight), broadcast(x));
}

inline Totals accumulate(Totals y, Sums x, float scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(scale), y);
}

inline Totals multiply_add(Totals sums, const float* x, const float* weight) {
    return _mm512_fmadd_ps(_mm512_loadu_ps(weight), _mm512_set1_ps(*x), sums);
}

inline Totals multiply_add(Totals sums, const uint16_t* x, const uint16_t* weight) {
    const __m512i inputs = broadcast(x), weights = _mm512_loadu_si512(weight);
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)inputs);
#else
    const __m512i high = fill(static_cast<int32_t>(0xffff0000));
    const auto first = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
    const auto second = [high](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, high)); };
    sums = _mm512_fmadd_ps(first(weights), first(inputs), sums);
    return _mm512_fmadd_ps(second(weights), second(inputs), sums);
#endif
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int kLanes = 8;
constexpr int kRows = 3, kFloatRows = 3, kGroups = 2;
using Sums = __m256i;
using Totals = __m256;

inline Sums fill(int32_t value) { return _mm256_set1_epi32(value); }

inline Sums broadcast(const void* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return fill(bits);
}

inline Sums load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline Sums multiply_add(Sums sums, const int8_t* x, const uint8_t* weight) {
    // Pairs of products are added in 16 bits, which inputs of 7 bits cannot exceed: see `levels` in packed.py.
    const __m256i pairs = _mm256_maddubs_epi16(load(weight), broadcast(x));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

inline Totals accumulate(Totals y, Sums x, float scale) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(x), _mm256_set1_ps(scale), y);
}

inline Totals multiply_add(Totals sums, const float* x, const float* weight) {
    return _mm256_fmadd_ps(_mm256_loadu_ps(weight), _mm256_set1_ps(*x), sums);
}

inline Totals multiply_add(Totals sums, const uint16_t* x, const uint16_t* weight) {
    const __m256i inputs = broadcast(x), weights = load(weight), high = fill(static_cast<int32_t>(0xffff0000));
    const auto first = [](__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); };
    const auto second = [high](__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, high)); };
    sums = _mm256_fmadd_ps(first(weights), first(inputs), sums);
    return _mm256_fmadd_ps(second(weights), second(inputs), sums);
}

#else

constexpr int kLanes = 1;
constexpr int kRows = 2, kFloatRows = 2, kGroups = 2;
using Sums = int32_t;
using Totals = float;

inline Sums fill(int32_t value) { return value; }

inline Sums multiply_add(Sums sums, const int8_t* x, const uint8_t* weight) {
    for (int i = 0; i < 4; ++i) sums += static_cast<int32_t>(x[i]) * weight[i];
    return sums;
}

inline Totals accumulate(Totals y, Sums x, float scale) { return y + static_cast<float>(x) * scale; }

inline Totals multiply_add(Totals sums, const float* x, const float* weight) { return sums + *x * *weight; }

inline Totals multiply_add(Totals sums, const uint16_t* x, const uint16_t* weight) {
    for (int i = 0; i < 2; ++i) {
        const uint32_t bits[] = {static_cast<uint32_t>(x[i]) << 16, static_cast<uint32_t>(weight[i]) << 16};
        float values[2];
        std::memcpy(values, bits, sizeof values);
        sums += values[0] * values[1];
    }
    return sums;
}

#endif

constexpr int kParts = 16 / kLanes;  // of a group

// Products of a tile: GROUPS groups of 16 outputs, ROWS rows. Weights and inputs are those of its first output and row.
template <int ROWS, int GROUPS>
using Tile = Totals[ROWS][GROUPS * kParts];

template <typename W, typename X, typename S, int ROWS, int GROUPS>
inline void add_products(S (&sums)[ROWS][GROUPS * kParts], const W* weight, const X* x, int64_t in, int64_t adjacent,
                         int64_t first, int64_t last) {
    for (int64_t k = first; k < last; k += adjacent) {
#pragma GCC unroll 32
        for (int g = 0; g < GROUPS * kParts; ++g) {
            const W* own = weight + g / kParts * 16 * in + 16 * k + g % kParts * kLanes * adjacent;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) sums[r][g] = multiply_add(sums[r][g], x + r * in + k, own);
        }
    }
}

template <int ROWS, int GROUPS>
inline void multiply_int8(Tile<ROWS, GROUPS>& totals, const Linear& layer, const Inputs& inputs, int64_t row,
                          int64_t output) {
    const int64_t in = padded(layer), blocks = blocks_of(layer.in);
    const uint8_t* weight = static_cast<const uint8_t*>(layer.weight) + output * in;
    for (int64_t b = 0; b < blocks; ++b) {
        Sums sums[ROWS][GROUPS * kParts];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 32
            for (int g = 0; g < GROUPS * kParts; ++g) sums[r][g] = fill(inputs.shifts[(row + r) * blocks + b]);
        }
        add_products<uint8_t, int8_t, Sums, ROWS, GROUPS>(sums, weight, inputs.integers.data() + row * in, in, 4,
                                                          b * kBlock, std::min(in, (b + 1) * kBlock));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 32
            for (int g = 0; g < GROUPS * kParts; ++g) {
                totals[r][g] = accumulate(totals[r][g], sums[r][g], inputs.scales[(row + r) * blocks + b]);
            }
        }
    }
}

// y = x W^T + b, or y += it, for a tile from `row` and `output` on.
template <WeightKind KIND, int ROWS, int GROUPS>
inline void multiply_tile(const Linear& layer, const Inputs& inputs, int64_t row, int64_t output, float* y,
                          int64_t stride, bool add) {
    const int64_t in = padded(layer);
    Tile<ROWS, GROUPS> totals = {};
    if constexpr (KIND == kFloat32) {
        const float* weight = static_cast<const float*>(layer.weight) + output * in;
        add_products<float, float, Totals, ROWS, GROUPS>(totals, weight, inputs.floats.data() + row * in, in, 1, 0, in);
    } else if constexpr (KIND == kBfloat16) {
        const uint16_t* weight = static_cast<const uint16_t*>(layer.weight) + output * in;
        add_products<uint16_t, uint16_t, Totals, ROWS, GROUPS>(totals, weight, inputs.halves.data() + row * in, in, 2,
                                                               0, in);
    } else {
        multiply_int8<ROWS, GROUPS>(totals, layer, inputs, row, output);
    }
    for (int g = 0; g < GROUPS; ++g) {
        const int64_t n = output + 16 * g, count = std::min<int64_t>(16, layer.out - n);
        for (int r = 0; r < ROWS; ++r) {
            float values[16];
            for (int p = 0; p < kParts; ++p) {
                const Totals total = totals[r][g * kParts + p];
                std::memcpy(values + kLanes * p, &total, sizeof total);
            }
            float* place = y + (row + r) * stride + n;
            for (int64_t o = 0; o < count; ++o) {
                float value = values[o] * (layer.scale ? layer.scale[n + o] : 1.0f);
                value += layer.bias ? layer.bias[n + o] : 0.0f;
                place[o] = add ? place[o] + value : value;
            }
        }
    }
}

struct Range {
    int64_t first, last;
};

// The part of `outputs` that a thread computes, in groups of 16.
Range share(int64_t outputs, int thread, int threads) {
    const int64_t groups = (outputs + 15) / 16;
    const int64_t first = 16 * (groups * thread / threads), last = 16 * (groups * (thread + 1) / threads);
    return {std::min(outputs, first), std::min(outputs, last)};
}

// Weights stay in the cache while all rows use them. For a single row, they are read strictly in order, as fast as
// memory allows: with several groups at a time, processors fetch less ahead.
template <WeightKind KIND>
void multiply_kind(const Linear& layer, const Inputs& x, int64_t rows, Range outputs, float* y, int64_t stride,
                   bool add) {
    constexpr int kTile = KIND == kInt8 ? kRows : kFloatRows;
    int64_t n = outputs.first;
    for (; rows > 1 && n + 16 * kGroups <= outputs.last; n += 16 * kGroups) {
        int64_t r = 0;
        for (; r + kTile <= rows; r += kTile) multiply_tile<KIND, kTile, kGroups>(layer, x, r, n, y, stride, add);
        for (; kTile > 4 && r + 4 <= rows; r += 4) multiply_tile<KIND, 4, kGroups>(layer, x, r, n, y, stride, add);
        for (; r + 2 <= rows; r += 2) multiply_tile<KIND, 2, kGroups>(layer, x, r, n, y, stride, add);
        for (; r < rows; ++r) multiply_tile<KIND, 1, kGroups>(layer, x, r, n, y, stride, add);
    }
    for (; n < outputs.last; n += 16) {
        for (int64_t r = 0; r < rows; ++r) multiply_tile<KIND, 1, 1>(layer, x, r, n, y, stride, add);
    }
}

// Some outputs of all rows, the first of them a multiple of 16.
void multiply(const Linear& layer, const Inputs& x, int64_t rows, Range outputs, float* y, int64_t stride, bool add) {
    switch (layer.kind) {
        case kFloat32:
            return multiply_kind<kFloat32>(layer, x, rows, outputs, y, stride, add);
        case kBfloat16:
            return multiply_kind<kBfloat16>(layer, x, rows, outputs, y, stride, add);
        default:
            return multiply_kind<kInt8>(layer, x, rows, outputs, y, stride, add);
    }
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
    void convert_inputs(const Linear& layer, const float* x, int64_t stride, const Norm* norm = nullptr) {
        inputs_.reserve(layer, step_.rows);
        for (int64_t r = 0; r < step_.rows; ++r) {
            const float* row = x + r * stride;
            if (norm) normalize(*norm, row, row_.data(), layer.in);
            inputs_.convert_row(layer, norm ? row_.data() : row, r);
        }
    }

    void project_normed(const Norm& norm, const Linear& layer, float* y) {
        convert_inputs(layer, x_, layer.in, &norm);
        multiply(layer, inputs_, step_.rows, share(layer.out, thread_, threads_), y, layer.out, false);
#pragma omp barrier
    }

    void add_projected(const Linear& layer, const float* inputs, int64_t stride) {
        convert_inputs(layer, inputs, stride);
        multiply(layer, inputs_, step_.rows, share(layer.out, thread_, threads_), x_, layer.out, true);
#pragma omp barrier
    }

    void feed_forward(const Block& block) {
        convert_inputs(block.fc1, x_, model_.dim, &block.norm2);
        const int64_t hidden = model_.hidden, stride = block.fc1.out;
        const Range own = share(hidden, thread_, threads_);
        float* y = shared_.hidden.data();
        multiply(block.fc1, inputs_, step_.rows, own, y, stride, false);
        if (model_.gated) {
            multiply(block.fc1, inputs_, step_.rows, {own.first + hidden, own.last + hidden}, y, stride, false);
        }
        for (int64_t r = 0; r < step_.rows; ++r) {
            float* row = y + r * stride;
            activate(model_.activation, row + own.first, own.last - own.first);
            if (model_.gated) {
                for (int64_t i = own.first; i < own.last; ++i) row[i] *= row[hidden + i];
            }
        }
#pragma omp barrier
        add_projected(block.fc2, y, stride);
    }

    void attend_cache(const Block& block, const Memory* cache, const Memory* prefix) {
        const int64_t size = model_.head_dim, group = model_.heads / model_.kv_heads;
        const int64_t stride = (model_.heads + 2 * model_.kv_heads) * size;
        const int64_t tasks = step_.rows * model_.heads;
        for (int64_t task = tasks * thread_ / threads_; task < tasks * (thread_ + 1) / threads_; ++task) {
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
        const int64_t tasks = step_.rows * model_.heads;
        for (int64_t task = tasks * thread_ / threads_; task < tasks * (thread_ + 1) / threads_; ++task) {
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
void run_linear(const Linear* layer, const float* x, float* y, int64_t rows, int32_t threads) {
    Inputs inputs;
    inputs.reserve(*layer, rows);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t r = 0; r < rows; ++r) inputs.convert_row(*layer, x + r * layer->in, r);
        const Range outputs = share(layer->out, omp_get_thread_num(), omp_get_num_threads());
        multiply(*layer, inputs, rows, outputs, y, layer->out, false);
    }
}

}  // extern "C"
