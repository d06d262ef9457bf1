/* Names of the element types that a file included once for each type uses; define TM_BF16 before
 * including it for bfloat16.
 *
 *   T, TYPED(name)              element, name with the type's suffix
 *   LOAD, STORE, ..._SOME       16 numbers, as float32 in registers
 *   STEP                        neighboring elements that one multiplication takes
 *   SPREAD(p)                   STEP elements at p in every lane
 *   LOADW(p)                    16 x STEP elements
 *   MULADD(acc, a, b)           adds up products in float32
 */
#undef T
#undef TYPED
#undef LOAD
#undef STORE
#undef LOAD_SOME
#undef STORE_SOME
#undef STEP
#undef WVEC
#undef SPREAD
#undef LOADW
#undef MULADD
#ifdef TM_BF16
#define T bf16
#define TYPED(name) name##_bf16
#define LOAD load16_bf16
#define STORE store16_bf16
#define LOAD_SOME load_some_bf16
#define STORE_SOME store_some_bf16
#define STEP 2
#define WVEC __m512i
#define SPREAD(p) spread_bf16(p)
#define LOADW(p) _mm512_loadu_si512(p)
#define MULADD(acc, a, b) dot_bf16(acc, a, b)
#else
#define T float
#define TYPED(name) name##_f32
#define LOAD load16_f32
#define STORE store16_f32
#define LOAD_SOME load_some_f32
#define STORE_SOME store_some_f32
#define STEP 1
#define WVEC __m512
#define SPREAD(p) _mm512_set1_ps(*(p))
#define LOADW(p) _mm512_loadu_ps(p)
#define MULADD(acc, a, b) _mm512_fmadd_ps(a, b, acc)
#endif
