/* CRC-32C: by the CPU's instruction, three strides side by side, or by a table. */
#include "crc32c.h"
#include <string.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define CRC_STRIDE 256u /* three strides are summed side by side: the instruction takes 3 cycles, but one can begin in each */

static uint32_t crc_table[8][256], crc_far[4][256]; /* crc_far: a sum moved past CRC_STRIDE zeros */
int crc_cpu;

static uint64_t crc_load(const uint8_t *p)
{
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

uint32_t crc_by_table(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t word = crc_load(p) ^ crc;
        crc = 0;
        for (unsigned i = 0; i < 8; i++)
            crc ^= crc_table[7 - i][(word >> (8 * i)) & 255];
    }
    for (; n; n--)
        crc = crc_table[0][(crc ^ *p++) & 255] ^ (crc >> 8);
    return crc;
}

static uint32_t crc_past(uint32_t crc)
{
    return crc_far[0][crc & 255] ^ crc_far[1][(crc >> 8) & 255] ^ crc_far[2][(crc >> 16) & 255] ^ crc_far[3][crc >> 24];
}

#if defined(__x86_64__) || defined(__aarch64__)
#if defined(__x86_64__)
#define CRC_TARGET __attribute__((target("sse4.2")))
#define CRC_8(crc, word) ((uint32_t)__builtin_ia32_crc32di((crc), (word)))
#define CRC_1(crc, byte) __builtin_ia32_crc32qi((crc), (byte))
#else
#define CRC_TARGET __attribute__((target("+crc")))
#define CRC_8(crc, word) __builtin_aarch64_crc32cx((crc), (word))
#define CRC_1(crc, byte) __builtin_aarch64_crc32cb((crc), (byte))
#endif
CRC_TARGET uint32_t crc_by_cpu(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n >= 3 * CRC_STRIDE; n -= 3 * CRC_STRIDE, p += 3 * CRC_STRIDE) {
        uint32_t second = 0, third = 0;
        for (unsigned i = 0; i < CRC_STRIDE; i += 8) {
            crc = CRC_8(crc, crc_load(p + i));
            second = CRC_8(second, crc_load(p + CRC_STRIDE + i));
            third = CRC_8(third, crc_load(p + 2 * CRC_STRIDE + i));
        }
        crc = crc_past(crc_past(crc) ^ second) ^ third;
    }
    for (; n >= 8; n -= 8, p += 8)
        crc = CRC_8(crc, crc_load(p));
    for (; n; n--)
        crc = CRC_1(crc, *p++);
    return crc;
}
#else
uint32_t crc_by_cpu(uint32_t crc, const uint8_t *p, size_t n) { return crc_by_table(crc, p, n); }
#endif

void crc_begin(void)
{
    uint8_t zeros[CRC_STRIDE] = {0};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
        crc_table[0][i] = crc;
    }
    for (unsigned k = 1; k < 8; k++)
        for (uint32_t i = 0; i < 256; i++)
            crc_table[k][i] = crc_table[0][crc_table[k - 1][i] & 255] ^ (crc_table[k - 1][i] >> 8);
    for (unsigned k = 0; k < 4; k++)
        for (uint32_t i = 0; i < 256; i++)
            crc_far[k][i] = crc_by_table(i << (8 * k), zeros, CRC_STRIDE);
#if defined(__x86_64__)
    crc_cpu = __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__aarch64__)
    crc_cpu = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}
