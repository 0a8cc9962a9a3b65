#!/bin/bash
echo west > travel.txt
